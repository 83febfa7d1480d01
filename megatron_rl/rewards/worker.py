"""One worker process of a pool: `python -m MODULE FD ARGUMENT MEMORY_MB PARENT_PID`, started by `worker_pool.WorkerPool` only.

It loads what ARGUMENT names (here JSON: a list of reward functions' (name, settings)), sends ("ready", "") or ("failed", reason), then
reads lists of (text, Problem) and answers each sample as soon as it is judged: here with a list of one Reward per function. It ends with
its pipe and with its parent, even in the middle of a computation.
"""

from __future__ import annotations

import contextlib
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
from parallel.plug import InputError

_PR_SET_PDEATHSIG = 1

SampleHandler = Callable[[str, Any], object]


def serve(load: Callable[[str], SampleHandler]) -> None:
    """Run this process as a worker until its pipe closes: answer each (text, problem) by the handler that `load` makes of ARGUMENT."""
    fd, argument, memory_mb, parent_pid = sys.argv[1:]
    die_with(int(parent_pid))
    for name in (signal.SIGINT, signal.SIGUSR1):  # Ctrl-C and a cluster's warning are for the parent
        signal.signal(name, signal.SIG_IGN)
    limit_memory(int(memory_mb))
    channel = Connection(int(fd))
    try:
        handle = load(argument)
    except BaseException as error:
        channel.send(("failed", error.rule if isinstance(error, InputError) else describe_error(error)))
        return
    channel.send(("ready", ""))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            for text, problem in channel.recv():
                channel.send(handle(text, problem))


def _load_functions(functions_json: str) -> SampleHandler:
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
        answer = None if verdict.answer is None else str(verdict.answer)
        # plain types: the parent unpickles them
        return Reward(float(verdict.value), bool(verdict.correct), str(verdict.error), answer=answer)
    except BaseException as error:  # libraries raise SystemExit and BaseExceptions of their own; none may end the worker
        return Reward(0.0, False, error=describe_error(error))


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def die_with(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent ends, even in the middle of a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before the call
            sys.exit(1)


def limit_memory(memory_mb: int) -> None:
    limit = memory_mb * 1024 * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    serve(_load_functions)
