"""Several reward functions in one sum: rules of the configuration, the weighted sum, and completions without a verdict."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megatron_rl.config import load_config
from megatron_rl.config.reward import RewardConfig
from megatron_rl.errors import RunError, UserError
from megatron_rl.rewards.scorer import Scorer, check_rewards, compute_length_reward
from megatron_rl.types import Problem, Reward

DOCS = Path(__file__).resolve().parents[3] / "docs" / "guides" / "rewards.md"
MATH, FORMAT = {"name": "math"}, {"name": "format", "pattern": ".*####.*", "weight": 0.25}
LENGTH = {"name": "length", "full_tokens": 10, "zero_tokens": 20, "weight": 0.5}


def config(*functions: dict[str, object], **others: object) -> RewardConfig:
    return RewardConfig.model_validate({"functions": functions, "workers": 1, **others})


def problems(*answers: str) -> list[Problem]:
    return [Problem(f"p{number}", "?", answer) for number, answer in enumerate(answers)]


@pytest.fixture
def load(tmp_path):
    def _load(text: str) -> RewardConfig:
        (tmp_path / "run.toml").write_text(f"[model]\npath = 'm'\n{text}")
        return load_config(tmp_path / "run.toml").reward

    return _load


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[reward]\nfunction = 'magic'", "reward.function = 'magic': must be one of math, exact, format, length, http, or your"
                                         " own as module:attribute"),
        ("[reward]\nfunction = 'http'", "reward.function = 'http': http needs url, in a table [[reward.functions]]"),
        ("[[reward.functions]]\nname = 'a b:c'", "reward.functions.0.name = 'a b:c': must be one of math"),
        ("[[reward.functions]]\nname = 'format'", "reward.functions.0: format needs pattern, in a table"),
        ("[[reward.functions]]\nname = 'math'\nurl = 'http://x'", "reward.functions.0: math has no setting url"),
        ("[[reward.functions]]\nname = 'my.module:f'\npattern = 'x'", "reward.functions.0: my.module:f has no setting pattern"),
        ("[[reward.functions]]\nname = 'format'\npattern = ''", "reward.functions.0.pattern = '': String should have at least 1 character"),
        ("[[reward.functions]]\nname = 'format'\npattern = '('", "reward.functions.0.pattern = '(': is not a valid regular expression"),
        ("[[reward.functions]]\nname = 'http'\nurl = 'host:80'", "reward.functions.0.url = 'host:80': must be a URL such as http://"),
        ("[[reward.functions]]\nname = 'length'\nfull_tokens = 1", "reward.functions.0: length needs zero_tokens, in a table"),
        ("[[reward.functions]]\nname = 'length'\nfull_tokens = 1\nzero_tokens = 1",
         "reward.functions.0: full_tokens and zero_tokens are both 1"),
        ("[[reward.functions]]\nname = 'length'\nfull_tokens = 1\nzero_tokens = 2", "reward: length does not judge the answer"),
        ("[reward]\nfunction = 'math'\n[[reward.functions]]\nname = 'math'", "reward: function and functions exclude each other"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(load, text, line):
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        load(text)
    assert "\n" not in str(caught.value)


def test_the_examples_of_the_documentation_are_right(load):
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", DOCS.read_text(), re.MULTILINE)
    tables = [block.replace("\n    ", "\n").strip() for block in blocks if "[reward]" in block or "[[reward.functions]]" in block]
    assert len(tables) == 7
    judged = [table for table in tables if '"length"' not in table or '"math"' in table]
    assert [list(load(table).parts) for table in judged] == [
        ["math"],
        ["math", "format"],
        ["exact"],
        ["examples.plugs.contains_answer:reward"],
        ["my_rewards:compute_score"],
        ["http"],
    ]


def test_the_first_that_judges_the_answer_decides():
    assert config(FORMAT, LENGTH, MATH, {"name": "exact"}).judges[0] == "math"
    assert config(LENGTH, FORMAT).judges == ["format"]
    assert list(config(FORMAT, MATH, FORMAT).parts) == ["format", "math", "format_2"]


def test_the_sum_is_weighted_and_keeps_its_parts():
    texts = ["so #### 5", "so 5", "so #### 6", "so #### 5"]
    with Scorer(config(FORMAT, MATH, LENGTH), print) as scorer:
        rewards = scorer.score(texts, problems("5", "5", "5", "5"), [10, 15, 10, 21])
    assert rewards == [
        Reward(1.75, True, parts={"format": 1.0, "math": 1.0, "length": 1.0}, answer="5"),
        Reward(1.25, True, parts={"format": 0.0, "math": 1.0, "length": 0.5}, answer="5"),
        Reward(0.25, False, parts={"format": 1.0, "math": 0.0, "length": 0.0}, answer="6"),
        Reward(1.25, True, parts={"format": 1.0, "math": 1.0, "length": 0.0}, answer="5"),
    ]
    with Scorer(RewardConfig(function="exact", workers=1), print) as scorer:  # a single function has no parts
        assert scorer.score(["5", "6"], problems("5", "5"), [1, 1]) == [Reward(1.0, True, answer="5"), Reward(0.0, False, answer="6")]


def test_the_value_of_a_length():
    for tokens, value in ((0, 1.0), (256, 1.0), (448, 0.75), (1024, 0.0), (5000, 0.0)):
        assert compute_length_reward(tokens, 256, 1024) == pytest.approx(value)
        assert compute_length_reward(tokens, 1024, 256) == pytest.approx(1 - value), "the other way round long answers are worth more"


SLOW = {"name": "exact", "pattern": "((?:a+)+b)"}
"""Takes exponential time on a sequence of a's."""


@pytest.mark.parametrize("on_error", ["zero", "exclude", "stop"])
def test_what_a_completion_without_a_verdict_gets(on_error):
    """A function fails, or the completion failed before it was scored."""
    messages: list[str] = []
    late, hung = "format, exact: timeout after 0.5 s", "environment: it hung"
    texts, golds = ["####aab", "####" + "a" * 60, "####aab"], problems("aab", "aab", "aab")
    with Scorer(config(FORMAT, SLOW, on_error=on_error, timeout=0.5), messages.append) as scorer:
        if on_error == "stop":
            with pytest.raises(RunError, match="a completion of problem p1 got no verdict .format, exact: timeout after 0.5 s., and"):
                scorer.score(texts, golds, [1, 1, 1], ["", "", hung])
        else:
            whole = Reward(1.25, True, parts={"format": 1.0, "exact": 1.0}, answer="aab")
            failed = [Reward(0.0, False, error, excluded=on_error == "exclude") for error in (late, hung)]
            assert scorer.score(texts, golds, [1, 1, 1], ["", "", hung]) == [whole, *failed]
    assert messages == [f"2 of 3 completions got no verdict: {late} (1); {hung} (1)"]


def test_one_function_that_raises_takes_the_whole_sum(tmp_path, monkeypatch):
    (tmp_path / "raising_reward.py").write_text("def reward(text, problem): raise KeyError(text)")
    monkeypatch.syspath_prepend(tmp_path)
    messages: list[str] = []
    with Scorer(config(FORMAT, {"name": "raising_reward:reward"}), messages.append) as scorer:
        rewards = scorer.score(list("abcde"), problems(*"abcde"), [1] * 5)
    assert {(reward.value, reward.excluded) for reward in rewards} == {(0.0, False)}
    assert rewards[0].error == "raising_reward:reward: KeyError: 'a'"
    assert messages[0].startswith("5 of 5 completions got no verdict: raising_reward:reward: KeyError: 'a' (1); ")
    assert messages[0].endswith("; and 2 other reasons")


def test_your_own_function_is_found_in_the_working_directory_and_checked_beforehand(tmp_path, monkeypatch):
    example = re.search(r"```python\n(from megatron_rl.*?)```", DOCS.read_text(), re.DOTALL)
    assert example
    (tmp_path / "my_module.py").write_text(example[1] + "\n\ndef wrong(text): ...\n")
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in sys.path
    own = RewardConfig(function="my_module:reward", workers=1)
    check_rewards(own)
    with Scorer(own, print) as scorer:
        assert scorer.score(["so 5", "so 6"], problems("5", "5"), [1, 1]) == [Reward(1.0, True), Reward(-0.1, False)]
    with pytest.raises(UserError, match=r"reward.function = 'my_module:wrong': must be a plain function of \(text, problem\)"):
        check_rewards(RewardConfig(function="my_module:wrong"))
    with pytest.raises(UserError, match=r"reward.functions = 'my_modul:reward': .*No module named 'my_modul'\); the function is searched"):
        check_rewards(config(MATH, {"name": "my_modul:reward"}))
