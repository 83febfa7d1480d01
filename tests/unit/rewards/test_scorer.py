"""Several reward functions in one sum, and rewards over HTTP from real servers."""

import json
import re
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn

from megatron_rl.config import load_config
from megatron_rl.config.reward import RewardConfig, RewardFunctionConfig
from megatron_rl.errors import RunError, UserError
from megatron_rl.rewards.http import HttpRewardClient
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
    assert [list(load(table).parts) for table in judged] == [
        ["math"],
        ["math", "format"],
        ["exact"],
        ["examples.plugs.contains_answer:reward"],
        ["http"],
    ]


def test_the_first_that_judges_the_answer_decides():
    assert config(FORMAT, LENGTH, MATH, {"name": "exact"}).correctness_label == "math"
    assert config(LENGTH, FORMAT).correctness_label == "format"
    assert list(config(FORMAT, MATH, FORMAT).parts) == ["format", "math", "format_2"]


def test_the_sum_is_weighted_and_keeps_its_parts():
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


DOCS = Path(__file__).resolve().parents[3] / "docs" / "guides" / "rewards.md"
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
    assert (
        body["problems"]
        == [{"id": "p", "prompt": "1+1=", "answer": "2", "level": 3, "source": "s", "history": [], "tools": [], "pass_rate": None}] * 2
    )
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
