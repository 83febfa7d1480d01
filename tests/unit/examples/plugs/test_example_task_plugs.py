"""The examples of a data source, a format, a reward and an environment, found and run as a user's own are."""

from pathlib import Path

import pytest

from megatron_rl.config.data import DataConfig
from megatron_rl.data.sets import read_set
from megatron_rl.errors import UserError
from megatron_rl.rewards import load_function
from megatron_rl.rewards.pool import call_reward_function
from megatron_rl.rollout.environments.base import Message, StepResult, load_environment
from megatron_rl.rollout.environments.pool import run_step
from megatron_rl.types import Episode, Problem, Reward

ROOT = Path(__file__).parents[4]


@pytest.fixture
def read(tmp_path):
    def _read(text: str, **settings: str) -> list[Problem]:
        (tmp_path / "questions.csv").write_text(text)
        table = {"source": "examples.plugs.csv_rows:read_csv", "format": "examples.plugs.hash_format:read_row"}
        data = DataConfig(train=[table], settings={"path": str(tmp_path / "questions.csv"), **settings})
        return read_set(data.train[0], data, "data.train").problems

    return _read


def test_rows_of_a_csv_file_in_a_format_of_its_own(read):
    rows = {"question": "5+3-6?", "answer": "8,2#2"}, {"question": "1+1?", "answer": "#2"}
    problems = [
        Problem(f"read_csv:{number}", row["question"], "2", level, "read_csv", columns=row)
        for number, level, row in ((1, 2, rows[0]), (2, 1, rows[1]))
    ]
    assert read('question,answer\n5+3-6?,"8,2#2"\n1+1?,#2\n') == problems
    assert read("question;answer\n5+3-6?;8,2#2\n1+1?;#2\n", delimiter=";") == problems


def test_mistakes_in_such_a_file_are_one_line(read):
    with pytest.raises(UserError, match="read_csv:2': the field answer has no # before the gold answer; correct or remove this row"):
        read("question,answer\n1?,#1\n2?,2\n")
    with pytest.raises(UserError, match="read_csv:1': format examples.plugs.hash_format:read_row fails .KeyError: 'answer'."):
        read("question,gold\n1?,#1\n")
    with pytest.raises(UserError, match="fails after 0 rows .FileNotFoundError: "):
        read("", path="absent.csv")


def test_the_reward_finds_the_answer_anywhere():
    reward = load_function("examples.plugs.contains_answer:reward")
    assert call_reward_function(reward, "it is 12", Problem("p", "?", "12")) == Reward(1.0, True)
    assert call_reward_function(reward, "it is 13", Problem("p", "?", "12")) == Reward(-0.1, False)


def test_the_dice_can_be_rolled_three_times():
    dice, episode = load_environment("examples.plugs.dice:Dice"), Episode("p", "?", "")
    results = []
    for _ in range(4):
        results.append(run_step(dice, ("<roll></roll>", "</roll>"), episode))
        episode = Episode("p", "?", "", state=results[-1].state)
    assert [result.message for result in results] == [*[Message("4")] * 3, Message("no roll is left", "too many rolls")]
    assert run_step(dice, ("it was 4", ""), episode) == StepResult()


@pytest.mark.parametrize("example, page", [("contains_answer", "rewards"), ("dice", "environments")])
def test_the_guides_show_the_examples_as_they_are(example, page):
    code = (ROOT / "examples" / "plugs" / f"{example}.py").read_text().split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in (ROOT / "docs" / "guides" / f"{page}.md").read_text()
