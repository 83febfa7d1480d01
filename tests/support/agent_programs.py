"""Agents for tests that use only the standard library, so they start fast."""

import json
import mmap
import random
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from hashlib import sha256
from os import environ, getpid, getppid, kill
from signal import SIGKILL, SIGSTOP

from megatron_rl.types import Reward

MAP_NORESERVE = 0x4000  # Linux's


def post(messages, **options):
    """Return the policy's answer."""
    request = urllib.request.Request(
        environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, **options}).encode(),
        {"Authorization": f"Bearer {environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def ask(problem):
    """Do what the problem's prompt says."""
    said = post([{"role": "user", "content": problem.prompt}], max_tokens=12)
    match problem.prompt:
        case "hang" | "leave":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600 if problem.prompt == "hang" else 0)
        case "daemon":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        case "raise":
            raise KeyError("no such thing")
        case "reward":
            return 0.5
        case "draw":
            return random.random() + float(problem.seed)
        case "loop":
            while True:
                with suppress(OSError):
                    post([{"role": "user", "content": problem.prompt}])
        case "branch":
            history = [{"role": "user", "content": "branch"}, {"role": "assistant", "content": said}]
            post([*history, {"role": "user", "content": "b"}], max_tokens=12)
            post([*history, {"role": "user", "content": "c"}], max_tokens=12)
    return None


def break_at_random(problem):
    """Ask twice, and fail in one of two ways, or not at all, depending on the policy's first answer."""
    said = post([{"role": "user", "content": problem.prompt}], max_tokens=6)
    match sha256(said.encode()).digest()[0] % 4:
        case 0:
            raise KeyError("no such thing")
        case 1:
            kill(getpid(), SIGKILL)
    post([{"role": "user", "content": problem.prompt}, {"role": "user", "content": "again"}], max_tokens=6)


def judge(text, problem):
    """Return a reward that a random model earns too."""
    value = sha256(text.encode()).digest()[0] / 255
    return Reward(value, value > 0.5)


def judge_oneself(problem):
    """Return the reward of one's own answer."""
    return judge(post([{"role": "user", "content": problem.prompt}], max_tokens=8), problem).value


def judge_nothing(problem):
    """Send no request."""


def hold_memory(problem):
    """Reserve 64 GiB of addresses, and hold as many MiB of memory as the prompt says, half of them in a child."""
    reserved = mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    half = int(problem.prompt) << 19
    held = b"x" * half
    post([{"role": "user", "content": "a"}], max_tokens=12)
    child = subprocess.Popen([sys.executable, "-c", f"held = b'x' * {half}; import time; time.sleep(3)"])
    child.wait()
    assert len(reserved) > len(held)


def end_server(problem):
    """Kill the server that this process's keeper was forked from."""
    with open(f"/proc/{getppid()}/stat") as file:
        kill(int(file.read().rpartition(")")[2].split()[1]), SIGKILL)


def end_keeper(problem):
    """Kill the keeper of this process, or stop it."""
    kill(getppid(), SIGSTOP if problem.prompt == "stop" else SIGKILL)
    time.sleep(600)


def main():
    """Run an agent as a program."""
    problem = json.loads(sys.stdin.readline())
    post([{"role": "user", "content": problem["prompt"]}])
    with open(environ["MEGATRON_RL_REWARD"], "w") as file:
        file.write(problem["answer"])


if __name__ == "__main__":
    main()
