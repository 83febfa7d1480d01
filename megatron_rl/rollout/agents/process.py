"""Agent processes: forked from a process that has imported the agent, watched without polling, and terminated together."""

import contextlib
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_rl.config.agent import AgentConfig
from megatron_rl.types import Problem
from megatron_rl.workers.child import LONGEST_STOP, KeptProcess

SERVER_ENDED = "the process that agents are forked from has ended"
_TAIL = 2000  # number of bytes of standard error that are kept


class AgentResult(NamedTuple):
    error: str = ""  # why the agent failed, or ""
    reward: float | None = None  # the reward that the agent gave itself, with `agent.own_reward`


class ServerEndedError(Exception):
    """The process that agents are forked from has ended, and with it all agents."""


class AgentServer:
    """The process that agents are forked from (`runner`), because importing an agent's packages takes longer than an episode."""

    def __init__(self, config: AgentConfig) -> None:
        words = ["function", config.name] if config.name else ["command", *(config.command or ())]
        search_path = [*(path or os.getcwd() for path in sys.path), os.getcwd()]  # as for rewards
        self._channel, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self.ready, self.ended = threading.Lock(), False, False
        with remote:
            # not through PYTHONPATH, which a program with its own interpreter would inherit
            start = f"import sys; sys.path[:] = {search_path!r}; from {__package__} import runner; runner.main()"
            self._process = KeptProcess(
                [sys.executable, "-P", "-c", start, str(remote.fileno()), str(config.memory_mb), *words],
                [remote.fileno()],
                os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def ask(self, message: object, files: Sequence[int] = ()) -> int:
        """Return the reply to a message. Raise ServerEndedError if the process has ended."""
        with self._lock:
            try:
                self.ready = self.ready or bool(self._channel.recv(64))  # once it has imported the agent
                socket.send_fds(self._channel, [json.dumps(message).encode()], files)
                reply = self._channel.recv(64)
            except OSError:
                reply = b""
            self.ended |= not reply
        if not reply:
            raise ServerEndedError
        return int(reply)

    def close(self) -> None:
        """Terminate the process and everything that it has forked."""
        self.ended = True
        self._channel.close()
        self._process.end()


class AgentProcess:
    """One agent working on one problem, in its own session. Its keeper (`megatron_rl.workers.keeper`) leaves nothing of it behind. It ends
    with its server, which ends with this process."""

    def __init__(self, config: AgentConfig, server: AgentServer, environment: Mapping[str, str], problem: Problem, seed: int) -> None:
        """Start the agent. Raise ServerEndedError if its server has ended."""
        self._config, self._server = config, server
        self._lock, self._reaped = threading.Lock(), False
        self._reward, given = (os.memfd_create(name) for name in ("megatron-rl-reward", "megatron-rl-problem"))
        self._stderr, remote = os.pipe()
        try:
            with os.fdopen(os.dup(given), "wb") as file:
                file.write(json.dumps(problem.to_json() | {"seed": seed}).encode() + b"\n")
            os.lseek(given, 0, os.SEEK_SET)
            self._pid = server.ask(environment, [given, remote, self._reward])
            self._pid_fd = os.pidfd_open(self._pid)
            self._deadline = time.monotonic() + config.timeout  # the server has imported the agent by now
        except (ServerEndedError, OSError):  # a fork of a server that has just ended
            os.close(self._stderr)
            os.close(self._reward)
            raise ServerEndedError from None
        finally:
            os.close(given)
            os.close(remote)

    def kill(self) -> None:
        """Have the keeper kill all processes of the agent."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._reaped and not self._server.ended:  # else another process may have this id
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, number)

    def run(self) -> AgentResult:
        """Wait until the agent ends by itself, through `kill`, or at its time limit."""
        try:
            tail, in_time = self._watch()
            if not in_time:
                self.kill()
                if not select.select([self._pid_fd], [], [], LONGEST_STOP)[0]:  # the agent has stopped its keeper
                    self._signal(signal.SIGKILL)
                    select.select([self._pid_fd], [], [])
            with self._lock:
                self._reaped = True
                code = self._server.ask(self._pid)
        except ServerEndedError:
            return AgentResult(SERVER_ENDED)
        finally:
            reward = os.pread(self._reward, 64, 0).decode(errors="replace")
            for file in (self._stderr, self._pid_fd, self._reward):
                os.close(file)
        if not in_time:
            return AgentResult(f"timeout after {self._config.timeout:g} s")
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            last_line = (tail.strip().splitlines() or [""])[-1][:500]
            return AgentResult(f"{how}: {last_line}" if last_line else how)
        if not self._config.own_reward:
            return AgentResult()
        try:
            value = float(reward)
        except ValueError:
            return AgentResult(f"wrote {reward!r} instead of a reward, and agent.own_reward is on")
        return AgentResult(reward=value) if math.isfinite(value) else AgentResult(f"gave itself a reward of {value}")

    def _watch(self) -> tuple[str, bool]:
        """Return the end of the agent's standard error, and whether the agent ended in time."""
        os.set_blocking(self._stderr, False)
        poll, tail, ended = select.poll(), b"", False
        for file in (self._pid_fd, self._stderr):
            poll.register(file, select.POLLIN)
        while not ended:
            events = poll.poll(max(self._deadline - time.monotonic(), 0) * 1000)
            if not events:
                return tail.decode(errors="replace"), False
            ended = any(file == self._pid_fd for file, _ in events)
            if any(file == self._stderr for file, _ in events):
                chunk = os.read(self._stderr, 1 << 16)
                tail = (tail + chunk)[-_TAIL:]
                if not chunk:  # closed
                    poll.unregister(self._stderr)
        return tail.decode(errors="replace"), True
