"""Agents for tests, by the standard library alone: they start fast."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from os import environ, getppid, kill
from signal import SIGKILL
from typing import Any

from megatron_rl.types import Problem


def post(messages: list[dict[str, Any]], **options: Any) -> str:
    """What the policy says."""
    request = urllib.request.Request(
        environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, **options}).encode(),
        {"Authorization": f"Bearer {environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def ask(problem: Problem) -> float | None:
    """Does what the problem's question says."""
    said = post([{"role": "user", "content": problem.prompt}], max_tokens=12)
    match problem.prompt:
        case "hang":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        case "leave":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        case "raise":
            raise KeyError("no such thing")
        case "reward":
            return 0.5
        case "loop":
            while True:
                with suppress(OSError):
                    post([{"role": "user", "content": problem.prompt}])
        case "branch":
            history = [{"role": "user", "content": "branch"}, {"role": "assistant", "content": said}]
            post([*history, {"role": "user", "content": "b"}], max_tokens=12)
            post([*history, {"role": "user", "content": "c"}], max_tokens=12)
    return None


def silent(problem: Problem) -> None:
    """Asks nothing."""


def end_server(problem: Problem) -> None:
    """Ends what it was forked from."""
    kill(getppid(), SIGKILL)


def main() -> None:
    """As a program."""
    problem = json.loads(sys.stdin.readline())
    post([{"role": "user", "content": problem["prompt"]}])
    with open(environ["MEGATRON_RL_REWARD"], "w") as file:
        file.write(problem["answer"])


if __name__ == "__main__":
    main()
