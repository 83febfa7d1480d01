"""The process of one episode: `python -m megatron_rl.rollout.agents.runner MEMORY_MB PARENT_PID KIND WORD...`, started by `process` only.

KIND `function`: WORD is a `module:attribute`, called with the problem; what it returns, if anything, is its reward. KIND `command`: the
words are a program, which takes this process's place. The problem is one line of JSON on the standard input. A reward is written as a
number into the file that `MEGATRON_RL_REWARD` names.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from megatron_rl.plugs import AGENTS
from megatron_rl.rewards.worker import die_with, limit_memory
from megatron_rl.types import Problem

REWARD_VARIABLE = "MEGATRON_RL_REWARD"


def run_function(name: str) -> None:
    """Call the agent's function with the problem."""
    problem = Problem(**json.loads(sys.stdin.readline()))
    reward = AGENTS.load(name)(problem)
    if reward is not None:
        with open(os.environ[REWARD_VARIABLE], "w", encoding="ascii") as file:
            file.write(repr(float(reward)))


def main() -> None:
    memory_mb, parent_pid, kind, *words = sys.argv[1:]
    die_with(int(parent_pid))
    for name in (signal.SIGINT, signal.SIGUSR1):  # Ctrl-C and a cluster's warning are for the parent
        signal.signal(name, signal.SIG_IGN)
    limit_memory(int(memory_mb))
    if kind == "command":
        try:
            os.execvp(words[0], words)
        except OSError as error:
            sys.exit(f"{words[0]}: {error.strerror}")
    run_function(words[0])


if __name__ == "__main__":
    main()
