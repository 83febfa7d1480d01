"""One reward worker: `python -m megatron_rl.rewards.worker FD FUNCTIONS MEMORY_MB PARENT_PID`, started by `RewardPool` only.

FUNCTIONS is JSON: a list of (name, settings). It loads them, says ("ready", "") or ("failed", why), then reads lists of (text, Problem)
and answers each sample, as soon as it is judged, with a list of one Reward per function. It ends with its pipe and with its parent,
whatever it is busy with.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from megatron_rl.rewards import load_function
from megatron_rl.types import Problem, Reward, RewardFunction

_PR_SET_PDEATHSIG = 1


SampleHandler = Callable[[str, Any], object]


def main(fd: int, functions_json: str, memory_mb: int, parent_pid: int) -> None:
    serve(lambda: _load(functions_json), fd, memory_mb, parent_pid)


def serve(load: Callable[[], SampleHandler], fd: int, memory_mb: int, parent_pid: int) -> None:
    """Answers each (text, problem) of the pool at the other end of the pipe `fd` by what `load` returns, until it closes."""
    _die_with(parent_pid)
    for name in (signal.SIGINT, signal.SIGUSR1):  # Ctrl-C and a cluster's warning are the parent's business
        signal.signal(name, signal.SIG_IGN)
    _limit_memory(memory_mb)
    channel = Connection(fd)
    try:
        function = load()
    except BaseException as error:
        channel.send(("failed", describe_error(error)))
        return
    channel.send(("ready", ""))
    try:
        while True:
            for text, problem in channel.recv():
                channel.send(function(text, problem))
    except (EOFError, ConnectionError):
        return


def _load(functions_json: str) -> SampleHandler:
    functions = [load_function(name, settings) for name, settings in json.loads(functions_json)]
    return lambda text, problem: [call_reward_function(function, text, problem) for function in functions]


def call_reward_function(function: RewardFunction, text: str, problem: Problem) -> Reward:
    """Call the reward function; whatever it raises or wrongly returns becomes a Reward of 0 that names the error."""
    try:
        verdict = function(text, problem)
        if not isinstance(verdict, Reward):
            raise TypeError(f"the reward function must return a Reward, not {type(verdict).__name__}")
        if not math.isfinite(verdict.value):
            raise ValueError(f"the reward function returned {verdict.value}")
        return Reward(float(verdict.value), bool(verdict.correct), str(verdict.error))  # plain types: the parent unpickles them
    except BaseException as error:  # libraries raise SystemExit and BaseExceptions of their own; none may end the worker
        return Reward(0.0, False, error=describe_error(error))


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _die_with(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent ends, even in the middle of a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before we asked
            sys.exit(1)


def _limit_memory(memory_mb: int) -> None:
    limit = memory_mb * 1024 * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
