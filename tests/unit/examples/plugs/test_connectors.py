"""Connectors to environments of other projects, as programs against the agents' endpoint. The long tests use the projects' own packages,
each in an environment of its own: for example VERIFIERS_PYTHON names the interpreter that has `verifiers`."""

import json
import os
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from support.agents import ChatTokenizer, Policy, config
from support.processes import ROOT, Command, free_port, until

from megatron_rl.config.data import DataConfig
from megatron_rl.data.sets import read_set
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.rollout.engine import ParsedToolCalls
from megatron_rl.types import Problem, SamplingParams

PLUGS, SUPPORT = ROOT / "examples" / "plugs", ROOT / "tests" / "support"


def needs(package):
    """Return the marks of a test that runs a real package, and its interpreter."""
    variable = package.upper().replace("-", "_") + "_PYTHON"
    python = os.environ.get(variable, "")
    reason = f"{variable} names no interpreter that has {package}"
    return pytest.mark.parametrize(
        "python", [pytest.param(python, marks=[pytest.mark.long, pytest.mark.skipif(not python, reason=reason)])]
    )


class Caller(Policy):
    """A policy that writes a call as `NAME{JSON}`."""

    def parse_tool_calls(self, text, tools, parser):
        names = [tool["function"]["name"] for tool in json.loads(tools)]
        calls = [(name, text.removeprefix(name)) for name in names if text.startswith(name)]
        return ParsedToolCalls("" if calls else text, calls)


def play(command, replies, rows, prompts=None, **settings):
    """Return the episodes of a program that gets a row each. `replies`: the policy's responses, by their number in the conversation."""
    prompts = prompts or ["q"] * len(rows)
    problems = [Problem(str(number), prompt, "5", columns=row) for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True))]
    plain = {"name": None, "command": tuple(command), "own_reward": True, "timeout": 1000.0, "workers": 2, "tool_parser": "x"}
    agent = config(**plain, **settings)
    say = replies if callable(replies) else lambda prompt: replies[prompt.count("<a>") - 1]
    with AgentSampler(agent, Caller(say), ChatTokenizer(), DataConfig()) as sampler:
        return sampler.sample(problems, [SamplingParams(1.0, 999, seed=1)] * len(problems), 5, 0)


def outcomes(episodes):
    return [(each.own_reward, each.calls, each.environment_error) for each in episodes]


@contextmanager
def serving(folder, *words, path="/openapi.json"):
    """Run a server with the words and a port, and yield its address."""
    url = f"http://127.0.0.1:{(port := free_port())}"

    def answers():
        try:
            return httpx.get(url + path, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    with Command(folder, args=[*map(str, words), str(port)]) as command:
        until(lambda: command.ended() or answers(), 600, "a server")
        assert not command.ended(), command.wait(1)
        yield url


TOOL = {"type": "function", "name": "increment_counter", "parameters": {"type": "object"}, "strict": False}
ASKED = {"input": [{"role": "user", "content": "add 3"}], "tools": [TOOL]}
COUNTS = [{"responses_create_params": ASKED, "initial_count": 4, "expected_count": count} for count in (7, 8)]
GYM = [sys.executable, str(PLUGS / "nemo_gym_agent.py")]


class Counter(BaseHTTPRequestHandler):
    """A resources server in the form of NeMo Gym's: sessions by cookie, a tool, and a judge."""

    protocol_version = "HTTP/1.1"
    counts: dict = {}  # noqa: RUF012 # of all sessions
    judged: list = []  # noqa: RUF012

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session, status, answer = self.headers.get("cookie", ""), 200, {}
        if self.path == "/seed_session":
            session = f"session={len(self.counts)}"
            self.counts[session] = body["initial_count"]
        elif self.path == "/verify":
            self.judged.append(body)
            answer = {**body, "reward": float(self.counts[session] == body["expected_count"])}
        elif isinstance(body.get("count"), int):
            self.counts[session] += body["count"]
            answer = {"success": True}
        else:
            status, answer = 422, {"detail": "count is missing"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("set-cookie", session)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_a_resources_server_in_the_form_of_nemo_gym_gives_tools_and_judges():
    replies = ["increment_counter{}", 'increment_counter{"count": 3}', "done"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Counter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert outcomes(play([*GYM, url], replies, COUNTS)) == [(1.0, 3, ""), (0.0, 3, "")]
        cut = play([*GYM, url], ['increment_counter{"count": 3}'] * 2, COUNTS[:1], max_calls=1)
        (failed,) = play([*GYM, url], replies, [{"responses_create_params": {"input": "q"}}])
        server.shutdown()
    assert outcomes(cut) == [(1.0, 1, "")], "the server judges what there is"
    assert cut[0].finish_reason == "turns" and failed.own_reward is None and failed.environment_error
    first = Counter.judged[0]["response"]["output"]
    assert [item["type"] for item in first] == ["function_call", "function_call_output"] * 2 + ["message"]
    assert [item["output"] for item in first if "output" in item] == ['{"detail": "count is missing"}', '{"success": true}']


def test_rows_of_nemo_gym_reach_the_agent_as_they_are(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in COUNTS))
    data = DataConfig(train=str(tmp_path / "rows.jsonl"), format="examples.plugs.nemo_gym_agent:read_row")
    problems = read_set(data.train[0], data, "data.train").problems
    assert [problem.columns for problem in problems] == COUNTS
    assert problems[0].prompt == '[{"role": "user", "content": "add 3"}]'


@needs("nemo-gym")
def test_a_server_of_nemo_gym_gives_tools_and_judges(python, tmp_path):
    replies = ["increment_counter{}", 'increment_counter{"count": 3}', "done"]
    with serving(tmp_path, python, SUPPORT / "nemo_gym_server.py") as url:
        assert outcomes(play([*GYM, url], replies, COUNTS)) == [(1.0, 3, ""), (0.0, 3, "")]


def check_openenv(python, guess, adder):
    """Play with two environments of `support.openenv_server`."""
    agent = [python, str(PLUGS / "openenv_agent.py")]
    right, cut = play([*agent, guess, "message"], ["5", "many", "7", "6"], [{"seed": 7}, {"seed": 6}], max_calls=3)
    assert outcomes([right, cut]) == [(0.75, 3, ""), (-0.5, 3, "")] and cut.finish_reason == "turns"
    assert '"hint": "more"' in right.dialogue[1] and "VALIDATION_ERROR" in right.dialogue[3]
    done, ended = play([*agent, adder], ['add{"a": 1}', "add[", 'add{"a": 2}', "done"], [{"seed": 6}, {"seed": 0}])
    assert outcomes([done, ended]) == [(1.0, 3, ""), (1.0, 4, "")]


@needs("openenv-core")
def test_environments_of_openenv_take_texts_and_calls(python, tmp_path):
    server = (python, SUPPORT / "openenv_server.py")
    with serving(tmp_path / "guess", *server, "guess") as guess, serving(tmp_path / "adder", *server, "adder") as adder:
        check_openenv(python, guess, adder)


CLIENT = """
from types import SimpleNamespace

class GenericEnvClient:
    def __init__(self, base_url, message_timeout_s):
        self.kind = base_url
    def sync(self):
        return self
    __enter__ = sync
    def __exit__(self, *_):
        pass
    def reset(self, seed):
        self.number = seed
        return SimpleNamespace(observation={"hint": "guess"} if self.kind == "guess" else {}, reward=None, done=False)
    def step(self, action):
        if action.get("type") == "list_tools":
            tools = [{"name": "add", "description": "", "input_schema": {"type": "object"}}]
            return SimpleNamespace(observation={"tools": tools}, reward=None, done=False)
        try:
            number = int(action["message"] if self.kind == "guess" else action["arguments"]["a"])
        except (ValueError, TypeError):
            raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)") from None
        if self.kind == "guess":
            hint = {"hint": "more" if number < self.number else "less"}
            return SimpleNamespace(observation=hint, reward=1.0 if number == self.number else -0.25, done=number == self.number)
        self.number += number
        return SimpleNamespace(observation={"tool_name": "add", "result": self.number}, reward=0.5, done=self.number == 9)
"""


def test_the_loop_with_a_stand_in_for_the_client_of_openenv(tmp_path, monkeypatch):
    (tmp_path / "openenv").mkdir()
    (tmp_path / "openenv" / "core.py").write_text(CLIENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_openenv(sys.executable, "guess", "adder")


TYPED = {"keystrokes": "echo yes > answer\n", "duration": 0.5}
STEP = json.dumps({"analysis": "", "plan": "", "commands": [TYPED], "task_complete": False})
LAST = json.dumps({"analysis": "", "plan": "", "commands": [], "task_complete": True})


@needs("harbor")
def test_a_task_of_harbor_is_worked_on_in_a_terminal_and_judged_by_its_tests(python, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    task = tmp_path / "task"
    for name, text in {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Write yes into /app/answer.\n",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": 'cd "$(dirname "$0")/.."; if grep -q yes app/answer; then echo 1; else echo 0; fi > logs/verifier/reward.txt\n',
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    settings = {"agent": {"name": "terminus-2"}, "environment": {"import_path": "harbor_local:LocalEnvironment"}}
    agent = [python, str(PLUGS / "harbor_agent.py"), json.dumps(settings)]
    rows = [{"task": str(task)}]
    assert outcomes(play(agent, [STEP, LAST, LAST], rows, max_tokens=100_000)) == [(1.0, 3, "")]
    (cut,) = play(agent, [STEP, LAST, LAST], rows, max_tokens=100_000, max_calls=1)
    assert (cut.own_reward, cut.calls, cut.finish_reason) == (1.0, 1, "turns")
    (missing,) = play(agent, [STEP], [{"task": str(tmp_path / "no")}])
    assert missing.own_reward is None and missing.environment_error


@needs("verifiers")
def test_a_taskset_of_verifiers_asks_the_policy_and_scores_its_reply(python, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    command = [python, str(PLUGS / "verifiers_agent.py"), json.dumps({"taskset": {"id": "vf_echo"}})]
    rows = [{"bonus": 0.25, "id": 3}, {}, {"bonus": "much"}]
    right, wrong, broken = play(command, lambda prompt: "yes5" if "q" in prompt else "no", rows, ["q", "x", "q"])
    assert outcomes([right, wrong]) == [(0.75, 1, ""), (0.0, 1, "")]
    assert (right.dialogue, wrong.dialogue) == (["yes5"], ["no"])
    assert broken.calls == 0 and "float_parsing" in broken.environment_error
