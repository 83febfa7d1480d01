"""The process that agents are forked from, started by `process` with the arguments SOCKET_FD MEMORY_MB KIND WORD...

KIND `function`: WORD is a `module:attribute`, imported once. Each fork calls it with its problem; a return value other than None is the
reward. KIND `command`: the words are a program that replaces each fork. A fork reads its problem, one line of JSON, from standard input and
writes its reward as a number into the file named by `MEGATRON_RL_REWARD`.

Once the agent is imported, the process sends "ready". A message with files (standard input, standard error, reward) requests a fork; the
reply is the process id of its keeper, which ends as the fork does and ends everything that the fork has started
(`megatron_rl.workers.keeper`). A process id without files requests the exit code of that process, which has ended. The process and its
forks end when its socket closes.
"""

import json
import os
import socket
import sys
from collections.abc import Callable

from megatron_rl.plugs import AGENTS
from megatron_rl.types import Episode
from megatron_rl.workers.keeper import MemoryLimit, become, fork_kept_child, ignore_signals_for_parent
from megatron_rl.workers.process import seed_libraries

REWARD_VARIABLE = "MEGATRON_RL_REWARD"
MOST_BYTES = 1 << 16  # maximum size of a message in bytes
_REWARD_FD = 100


def load_function(name: str) -> Callable[[], None]:
    """Import an agent's function. Return a function that calls it with the problem from standard input."""
    function = AGENTS.load(name)

    def run() -> None:
        episode = Episode(**json.loads(sys.stdin.readline()))
        seed_libraries(episode.seed)  # a fork has the random numbers of the process that it was forked from
        reward = function(episode)
        if reward is not None:
            with open(os.environ[REWARD_VARIABLE], "w", encoding="ascii") as file:
                file.write(repr(float(reward)))

    return run


def serve(channel: socket.socket, memory_mb: int) -> bool:
    """Fork on request. Return True in a fork, with its files, limits and environment in place, or False once the socket has closed."""
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
        fork_kept_child(server, files, limit=MemoryLimit("agent.memory_mb", memory_mb, files[1]))
        for source, target in zip(files, (0, 2, _REWARD_FD), strict=True):
            os.dup2(source, target)  # programs inherit these files too
        os.environ.update(request, **{REWARD_VARIABLE: f"/dev/fd/{_REWARD_FD}"})
        return True


def main() -> None:
    socket_fd, memory_mb, kind, *words = sys.argv[1:]
    ignore_signals_for_parent()
    run = load_function(words[0]) if kind == "function" else lambda: become(words)
    channel = socket.socket(fileno=int(socket_fd))
    channel.send(b"ready")
    if serve(channel, int(memory_mb)):
        run()
