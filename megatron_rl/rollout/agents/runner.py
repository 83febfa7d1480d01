"""The process that agents are forked from, with arguments SOCKET_FD MEMORY_MB KIND WORD...

Started by `process` only. KIND `function`: WORD is a `module:attribute`, imported once; each fork calls it with its problem, and what it
returns, if anything, is its reward. KIND `command`: the words are a program, which takes each fork's place. A fork reads its problem, one
line of JSON, from its standard input, and writes its reward as a number into the file that `MEGATRON_RL_REWARD` names.

A message with files (standard input, standard error, reward) asks for a fork, whose number is the reply; a number without files asks for
the exit code of that fork, which has ended. The process ends when its socket closes, and its forks with it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable

from megatron_rl.plugs import AGENTS
from megatron_rl.rewards.worker import die_with, limit_memory
from megatron_rl.types import Problem

REWARD_VARIABLE = "MEGATRON_RL_REWARD"
MOST_BYTES = 1 << 16
"""Of one message."""
_REWARD_FD = 100


def load_function(name: str) -> Callable[[], None]:
    """Import an agent's function; what is returned calls it with the problem."""
    function = AGENTS.load(name)

    def run() -> None:
        reward = function(Problem(**json.loads(sys.stdin.readline())))
        if reward is not None:
            with open(os.environ[REWARD_VARIABLE], "w", encoding="ascii") as file:
                file.write(repr(float(reward)))

    return run


def become(words: list[str]) -> None:
    """Let a program take this process's place."""
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}")


def serve(channel: socket.socket, memory_mb: int) -> bool:
    """Fork as asked. Return True in a fork, with its files, limits and environment in place, and False where the socket has closed."""
    server = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(channel, MOST_BYTES, 3)
        if not message:
            return False
        request = json.loads(message)
        if not files:
            _, status = os.waitpid(request, 0)
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        if pid := os.fork():
            channel.send(str(pid).encode())
            for file in files:
                os.close(file)
            continue
        channel.close()
        os.setsid()
        die_with(server)
        for source, target in zip(files, (0, 2, _REWARD_FD), strict=True):
            os.dup2(source, target)  # inherited by a program, too
        os.environ.update(request, **{REWARD_VARIABLE: f"/dev/fd/{_REWARD_FD}"})
        limit_memory(memory_mb)
        return True


def main() -> None:
    socket_fd, memory_mb, kind, *words = sys.argv[1:]
    for name in (signal.SIGINT, signal.SIGUSR1):  # Ctrl-C and a cluster's warning are for the parent
        signal.signal(name, signal.SIG_IGN)
    run = load_function(words[0]) if kind == "function" else lambda: become(words)
    if serve(socket.socket(fileno=int(socket_fd)), int(memory_mb)):
        run()
