"""Several reward functions in one sum, the built-in functions, and rewards over HTTP from real servers."""

import json
import random
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import load_config
from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.config.reward import RewardConfig, RewardFunctionConfig
from megatron_rl.data.sets import read_problem_set
from megatron_rl.errors import RunError, UserError
from megatron_rl.rewards import load_function, match
from megatron_rl.rewards import math as math_reward
from megatron_rl.rewards.http import HttpRewardClient
from megatron_rl.rewards.scorer import Scorer, check_rewards, compute_length_reward
from megatron_rl.types import Problem, Reward
from parallel.plug import InputError

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
        ("[[reward.functions]]\nname = 'math'\nurl = 'x'", "reward.functions.0: math has no setting url"),
        ("[[reward.functions]]\nname = 'my.module:f'\npattern = 'x'", "reward.functions.0: my.module:f has no setting pattern"),
        ("[[reward.functions]]\nname = 'format'\npattern = ''", "reward.functions.0.pattern = '': String should have at least 1 character"),
        ("[[reward.functions]]\nname = 'format'\npattern = '('", "reward.functions.0: pattern '(' is not a valid regular expression"),
        ("[[reward.functions]]\nname = 'http'\nurl = 'host:80'", "reward.functions.0: url 'host:80' must be a URL such as http://"),
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
    assert len(tables) == 6
    judged = [table for table in tables if '"length"' not in table or '"math"' in table]
    parts = [["math"], ["math", "format"], ["exact"], ["examples.plugs.contains_answer:reward"], ["http"]]
    assert [list(load(table).parts) for table in judged] == parts


def test_the_first_that_judges_the_answer_decides():
    assert config(FORMAT, LENGTH, MATH, {"name": "exact"}).correctness_label == "math"
    assert config(LENGTH, FORMAT).correctness_label == "format"
    assert list(config(FORMAT, MATH, FORMAT).parts) == ["format", "math", "format_2"]


def test_the_sum_is_weighted_and_keeps_its_parts_and_a_length_has_a_value():
    for tokens, value in ((0, 1.0), (256, 1.0), (448, 0.75), (1024, 0.0), (5000, 0.0)):
        assert compute_length_reward(tokens, 256, 1024) == pytest.approx(value)
        assert compute_length_reward(tokens, 1024, 256) == pytest.approx(1 - value), "the other way round long answers are worth more"
    texts = ["so #### 5", "so 5", "so #### 6", "so #### 5"]
    with Scorer(config(FORMAT, MATH, LENGTH), print) as scorer:
        rewards = scorer.score(texts, problems("5", "5", "5", "5"), [10, 15, 10, 21])
    assert rewards == [
        Reward(1.75, True, parts={"format": 1.0, "math": 1.0, "length": 1.0}),
        Reward(1.25, True, parts={"format": 0.0, "math": 1.0, "length": 0.5}),
        Reward(0.25, False, parts={"format": 1.0, "math": 0.0, "length": 0.0}),
        Reward(1.25, True, parts={"format": 1.0, "math": 1.0, "length": 0.0}),
    ]
    with Scorer(RewardConfig(function="exact", workers=1), print) as scorer:  # a single function has no parts
        assert scorer.score(["5", "6"], problems("5", "5"), [1, 1]) == [Reward(1.0, True), Reward(0.0, False)]


SLOW = {"name": "exact", "pattern": "((?:a+)+b)"}
"""Takes exponential time on a sequence of a's."""


@pytest.mark.parametrize("on_error", ["zero", "exclude", "stop"])
def test_what_a_completion_without_a_verdict_gets(on_error):
    messages: list[str] = []
    late, hung = "format, exact: timeout after 0.5 s", "environment: it hung"
    texts, golds = ["####aab", "####" + "a" * 60, "####aab"], problems("aab", "aab", "aab")
    with Scorer(config(FORMAT, SLOW, on_error=on_error, timeout=0.5), messages.append) as scorer:
        if on_error == "stop":
            with pytest.raises(RunError, match="a completion of problem p1 got no verdict .format, exact: timeout after 0.5 s., and"):
                scorer.score(texts, golds, [1, 1, 1], ["", "", hung])
        else:
            whole = Reward(1.25, True, parts={"format": 1.0, "exact": 1.0})
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
    with pytest.raises(UserError, match=r"reward.function = 'my_module:wrong': .* must be a plain function of \(text, problem\)"):
        check_rewards(RewardConfig(function="my_module:wrong"))
    with pytest.raises(UserError, match=r"reward.functions = 'my_modul:reward': .*No module named 'my_modul'\); the function is searched"):
        check_rewards(config(MATH, {"name": "my_modul:reward"}))


PROBLEMS = [Problem("p", "1+1=", "2", level=3, source="s")] * 5
TEXTS = ["so 2", "so 3", "2", "\ud800 2", "5"]


class Misbehaving(BaseHTTPRequestHandler):
    """A server whose behavior is given by the path. `server.seen` records what it receives."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((dict(self.headers), body))
        count = len(body["texts"])
        if self.path == "/hang":
            self.server.released.wait(60)
        if self.path == "/drip":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(240):
                self.wfile.write(b" ")  # ends when the client hangs up
                time.sleep(0.25)
        first = len(self.server.seen) == 1
        status = {"/busy": 503, "/broken": 500}.get(self.path, 503 if first and self.path == "/busy-once" else 200)
        answers = {
            "/garbage": "<html>", "/few": '{"rewards": [1.0]}', "/text": json.dumps({"rewards": ["1"] * count}),
            "/other": '{"scores": []}', "/partly": '{"rewards": [1.0, null, NaN, -1, 1e999]}',
            "/few-correct": json.dumps({"rewards": [1.0] * count, "correct": []}),
        }  # fmt: skip
        body = answers.get(self.path, json.dumps({"rewards": [0.5] * count})).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Misbehaving) as running:
        running.seen, running.handle_error, running.daemon_threads = [], lambda *_: None, True
        running.released = threading.Event()
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.released.set()
        running.shutdown()
        thread.join()


def client(server, path: str, **settings: object) -> HttpRewardClient:
    return HttpRewardClient(RewardFunctionConfig(name="http", url=f"http://127.0.0.1:{server.server_port}{path}", **settings))


def test_the_protocol(server, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "secret\n")
    assert client(server, "/", batch_size=2, token_env="REWARD_TOKEN").score(TEXTS, PROBLEMS) == [Reward(0.5, True)] * 5
    assert sorted(len(body["texts"]) for _, body in server.seen) == [1, 2, 2]
    headers, body = next(seen for seen in server.seen if seen[1]["texts"][0] == TEXTS[0])
    assert headers["Authorization"] == "Bearer secret"
    sent = {"id": "p", "prompt": "1+1=", "answer": "2", "level": 3, "source": "s", "history": [], "tools": [], "pass_rate": None}
    assert body["problems"] == [sent] * 2
    assert client(server, "/").score([], []) == []


@pytest.mark.parametrize(
    "path, error, requests",
    [
        ("/hang", "timeout after 0.5 s", 2),
        ("/drip", "timeout after 0.5 s", 2),
        ("/busy", 'HTTP status 503: {"rewards"', 2),
        ("/broken", "HTTP status 500: ", 1),
        ("/garbage", "unusable answer: answer: Invalid JSON", 1),
        ("/other", "unusable answer: rewards: Field required", 1),
        ("/text", "unusable answer: rewards.0: Input should be a valid number", 1),
        ("/few", "unusable answer: 1 rewards for 5 completions", 1),
        ("/few-correct", "unusable answer: 0 correct for 5 completions", 1),
    ],
)
def test_a_server_that_fails_costs_the_samples_only(server, path, error, requests):
    client(server, "/").score(TEXTS, PROBLEMS)  # what is imported at the first request takes long on a busy machine
    server.seen.clear()
    start = time.monotonic()
    rewards = client(server, path, timeout=0.5, retries=1).score(TEXTS, PROBLEMS)
    assert time.monotonic() - start < 30
    assert len(rewards) == 5 and all(reward.error.startswith(error) and not reward.correct for reward in rewards), rewards[0]
    assert len(server.seen) == requests


def test_a_busy_server_is_asked_again_and_may_give_single_completions_no_verdict(server):
    assert client(server, "/busy-once", retries=1).score(TEXTS, PROBLEMS) == [Reward(0.5, True)] * 5
    rewards = client(server, "/partly").score(TEXTS, PROBLEMS)
    assert rewards[0] == Reward(1.0, True) and rewards[3] == Reward(-1.0, False)
    errors = {number: reward.error for number, reward in enumerate(rewards) if reward.error}
    assert errors == {number: f"the server gave the reward {value}" for number, value in ((1, "null"), (2, "nan"), (4, "inf"))}


def test_nobody_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        part = RewardFunctionConfig(name="http", url=f"http://127.0.0.1:{taken.getsockname()[1]}", retries=0)
        messages: list[str] = []
        with Scorer(RewardConfig(functions=(part,), on_error="exclude"), messages.append) as scorer:
            rewards = scorer.score(TEXTS, PROBLEMS, [1] * 5)
        assert all(reward.excluded and reward.error.startswith("ConnectError: ") for reward in rewards)
        assert len(messages) == 1
        with pytest.raises(UserError, match=r"reward.functions.url = .* fails on an empty batch: ConnectError.*; start the server"):
            check_rewards(RewardConfig(functions=(part,)))


@pytest.mark.parametrize("token", ["", "two\nlines", "ключ"])
def test_a_token_that_is_none_is_refused_and_not_shown(monkeypatch, token):
    monkeypatch.setenv("REWARD_TOKEN", token)
    with pytest.raises(UserError, match="reward.functions.token_env = 'REWARD_TOKEN': ") as caught:
        HttpRewardClient(RewardFunctionConfig(name="http", url="http://localhost", token_env="REWARD_TOKEN"))
    assert not token or token not in str(caught.value)


def test_the_documentations_server_beside_a_function_in_a_worker(tmp_path):
    example = re.search(r"```python\n(from fastapi.*?)```", DOCS.read_text(), re.DOTALL)
    assert example
    names: dict[str, object] = {}
    exec(compile(example[1], "reward_server.py", "exec", dont_inherit=True), names)
    running = uvicorn.Server(uvicorn.Config(names["app"], port=0, log_level="error"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.02)
        url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/score"
        form = RewardFunctionConfig(name="format", pattern="so.*", weight=0.5)
        config = RewardConfig(functions=(RewardFunctionConfig(name="http", url=url), form), workers=1)
        check_rewards(config)
        with Scorer(config, print) as scorer:
            rewards = scorer.score(TEXTS, PROBLEMS, [1] * 5)
    finally:
        running.should_exit = True
        thread.join()
    assert [reward.value for reward in rewards] == [1.5, 0.5, 1.0, 1.0, 0.0]
    assert [reward.correct for reward in rewards] == [True, False, True, True, False]
    assert rewards[1].parts == {"http": 0.0, "format": 1.0}


DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
GSM8K_TEST, MATH_500 = DATA / "gsm8k" / "test.jsonl", DATA / "math500" / "test.jsonl"


def _problem(answer: str) -> Problem:
    return Problem("p", "?", answer)


@pytest.mark.parametrize(
    "verdict, text, gold",
    [
        (True, r"so \boxed{72}", "72"),
        (True, r"\boxed{1} and then \boxed{1,\!080}", "1080"),
        (True, "... = 72\n#### 1,080", "1080"),
        (True, "The answer is **72**. Then 3 more words.", "72"),
        (True, r"Thus the answer is $\$5$.", "5"),
        (True, "She sold 48 + 24 = 72 clips in a day.", "72"),
        (True, "-0012", "-12"),
        (False, r"72 or \boxed{73}", "72"),
        (False, "72\n#### 73", "72"),
        (False, "the answer is 73. No, 72", "72"),
        (False, "#### -5", "5"),
    ],
)
def test_the_fast_path_decides_between_integers_and_leaves_expressions_to_math_verify(verdict, text, gold):
    assert math_reward.compare_integers(text, gold) is verdict
    expressions = ["x = 3/5", "3 + 5", "it is 5x", "sqrt 5", "5 pi", r"\frac{3}{5}", "the answer is 10 or 5", r"\boxed{2.5 \cdot 2}"]
    for expression in [*expressions, "5.5", "2^5"]:
        assert math_reward.compare_integers(expression, "5") is None


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_the_fast_path_compares_values(stated, gold):
    for text in (rf"\boxed{{{stated:,}}}", f"#### {stated}", f"The answer is {stated}."):
        assert math_reward.compare_integers(text, str(gold)) == (stated == gold)


@pytest.mark.parametrize(
    "text, gold, correct",
    [
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{72.0}", "72", True),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", True),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", False),
        ("no idea", r"\frac{1}{2}", False),
        ("", "72", False),
        (r"\boxed{", "72", False),
    ],
)
def test_math_verify_decides_the_rest(text, gold, correct):
    assert math_reward.reward(text, _problem(gold)) == Reward(float(correct), correct)


@pytest.mark.parametrize(
    "text, pattern, correct",
    [
        (" Paris\n", "", True),
        ("paris", "", False),
        ("It is Paris", "", False),
        ("<answer>Rome</answer> no: <answer>\nParis</answer>", "<answer>(.*?)</answer>", True),
        ("<answer>Paris</answer> no: <answer>Rome</answer>", "<answer>(.*?)</answer>", False),
        ("no tags: Paris", "<answer>(.*?)</answer>", False),
        ("I say Paris, not Lyon", "Paris|Rome", True),
        ("()", r"(x)?\(\)", False),  # a group that took no part
    ],
)
def test_exact_compares_word_for_word(text, pattern, correct):
    settings = {"pattern": pattern} if pattern else {}
    assert match.match_answer(text, _problem("Paris"), **settings) == Reward(float(correct), correct)


@pytest.mark.parametrize(
    "text, fits", [("<think>\na\n\nb</think> 5", True), ("\n<think></think>5 \n", True), ("so <think>a</think>5", False), ("", False)]
)
def test_format_matches_the_whole_completion(text, fits):
    assert match.match_format(text, _problem("5"), pattern="<think>.*</think>.+") == Reward(float(fits), fits)


async def asynchronous(text, problem): ...


def without_a_problem(text): ...


def with_defaults(text, problem, extra=1): ...


def test_functions_are_found_by_name_and_what_is_none_is_refused():
    assert load_function("math") is load_function("megatron_rl.rewards.math:reward") is math_reward.reward
    assert load_function("format", {"pattern": "a+"})("aa", _problem("")).correct
    assert load_function(f"{__name__}:with_defaults") is with_defaults
    for name in ("absent", "DATA", "asynchronous", "without_a_problem"):
        with pytest.raises(InputError, match=f"^reward.function = {__name__}:{name}: "):
            load_function(f"{__name__}:{name}")


def _correct(texts: list[str], golds: list[str]) -> int:
    return sum(math_reward.reward(text, _problem(gold)).correct for text, gold in zip(texts, golds, strict=True))


@pytest.mark.skipif(not GSM8K_TEST.is_file(), reason=f"the GSM8K file is not at {GSM8K_TEST}")
def test_real_gsm8k_golds_verify_and_another_problems_gold_does_not():
    problems = read_problem_set(DataSourceConfig(source=str(GSM8K_TEST)), DataConfig(format="gsm8k"), "data.eval")
    golds = [problem.answer for problem in problems]
    texts = [json.loads(line)["answer"] for line in GSM8K_TEST.read_text().splitlines()]
    assert _correct(texts, golds) == _correct([rf"\boxed{{{gold}}}" for gold in golds], golds) == len(golds) == 1319
    others = golds[1:] + golds[:1]
    assert _correct(texts, others) == sum(gold == other for gold, other in zip(golds, others, strict=True))
    for problem in problems[:50]:  # through math-verify too
        text = rf"so \boxed{{\frac{{{2 * int(problem.answer)}}}{{2}}}}"
        assert math_reward.compare_integers(text, problem.answer) is None
        assert math_reward.reward(text, problem).correct


@pytest.mark.long
@pytest.mark.skipif(not MATH_500.is_file(), reason=f"the MATH-500 file is not at {MATH_500}")
def test_real_math500_golds_verify_and_shuffled_ones_fail():
    rows = [json.loads(line) for line in MATH_500.read_text().splitlines()]
    golds = [row["answer"] for row in rows]
    assert _correct([row["solution"] for row in rows], golds) == len(golds) == 500
    assert _correct([rf"so \boxed{{{gold}}}" for gold in golds], golds) == 500
    shuffled = random.Random(0).sample(golds, len(golds))
    pairs = [(rf"\boxed{{{stated}}}", gold) for stated, gold in zip(shuffled, golds, strict=True) if stated != gold][:200]
    assert len(pairs) == 200
    assert _correct(*map(list, zip(*pairs, strict=True))) <= 1
