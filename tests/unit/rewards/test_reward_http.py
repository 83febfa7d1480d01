"""Rewards over HTTP from real servers: the documentation's example, and a server that misbehaves."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn

from megatron_rl.config.reward import RewardConfig, RewardFunctionConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.http import HttpRewardClient
from megatron_rl.rewards.scorer import Scorer, check_rewards
from megatron_rl.types import Problem, Reward

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
