"""The processes of the agents: forked from one that has imported the agent, watched without polling, and ended together."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megatron_rl.config.agent import AgentConfig
from megatron_rl.types import Problem

_TAIL = 2000
"""Bytes of the standard error that are kept."""
_STOP_SECONDS = 10


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended."""

    error: str = ""
    """Why it failed; "" where it did not."""
    reward: float | None = None
    """What it gave itself, with `agent.own_reward`."""


class ServerEndedError(Exception):
    """The process that agents are forked from has ended, and they with it."""


class AgentServer:
    """The process that agents are forked from (`runner`): importing an agent's packages takes longer than an episode of it."""

    def __init__(self, config: AgentConfig) -> None:
        """Start it, without waiting for it."""
        words = ["function", config.name] if config.name else ["command", *(config.command or ())]
        search_path = [*(path or os.getcwd() for path in sys.path), os.getcwd()]  # as for rewards
        self._channel, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self.ended = threading.Lock(), False
        with remote:
            # not by PYTHONPATH, which a program in an interpreter of its own would inherit
            start = f"import sys; sys.path[:] = {search_path!r}; from {__package__} import runner; runner.main()"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", start, str(remote.fileno()), str(config.memory_mb), *words],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def ask(self, message: object, files: Sequence[int] = ()) -> int:
        """Return its reply to a message. Raise ServerEndedError where it has ended."""
        with self._lock:
            try:
                socket.send_fds(self._channel, [json.dumps(message).encode()], files)
                reply = self._channel.recv(64)
            except OSError:
                reply = b""
            self.ended |= not reply
        if not reply:
            raise ServerEndedError
        return int(reply)

    def close(self) -> None:
        """End it, and all that it has forked."""
        self.ended = True
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self._process.kill()
        self._process.wait()


class AgentProcess:
    """One agent at work on one problem, in a session of its own. It ends with its server, and that with this process."""

    def __init__(self, config: AgentConfig, server: AgentServer, environment: Mapping[str, str], problem: Problem) -> None:
        """Start it. Raise ServerEndedError where that cannot be done."""
        self._config, self._server, self._deadline = config, server, time.monotonic() + config.timeout
        self._lock, self._reaped = threading.Lock(), False
        self._reward, given = (os.memfd_create(name) for name in ("megatron-rl-reward", "megatron-rl-problem"))
        self._stderr, remote = os.pipe()
        try:
            with os.fdopen(os.dup(given), "wb") as file:
                file.write(json.dumps(asdict(problem)).encode() + b"\n")
            os.lseek(given, 0, os.SEEK_SET)
            self._pid = server.ask(environment, [given, remote, self._reward])
            self._pid_fd = os.pidfd_open(self._pid)
        except (ServerEndedError, OSError):  # a fork of a server that has just ended
            os.close(self._stderr)
            os.close(self._reward)
            raise ServerEndedError from None
        finally:
            os.close(given)
            os.close(remote)

    def kill(self) -> None:
        """End all its processes."""
        with self._lock:
            if self._reaped or self._server.ended:  # its number may be another's
                return
            for end in (os.killpg, os.kill):  # it may not lead its session yet
                with contextlib.suppress(ProcessLookupError):
                    end(self._pid, signal.SIGKILL)

    def run(self) -> AgentResult:
        """Return when it has ended, by itself or by `kill` or at its time limit."""
        try:
            tail, in_time = self._watch()
            self.kill()  # it is not yet waited for, so its session is still its own
            if not in_time:
                select.select([self._pid_fd], [], [])
            with self._lock:
                self._reaped = True
                code = self._server.ask(self._pid)
        except ServerEndedError:
            return AgentResult("the process that agents are forked from has ended")
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
        return _read_reward(reward) if self._config.own_reward else AgentResult()

    def _watch(self) -> tuple[str, bool]:
        """Return the end of what it says on its standard error, and whether it ended in time."""
        os.set_blocking(self._stderr, False)
        poll, tail = select.poll(), b""
        poll.register(self._pid_fd, select.POLLIN)
        poll.register(self._stderr, select.POLLIN)
        ended = False
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


def _read_reward(text: str) -> AgentResult:
    try:
        reward = float(text)
    except ValueError:
        return AgentResult(f"gave no reward but {text!r}, and agent.own_reward is on")
    return AgentResult(reward=reward) if math.isfinite(reward) else AgentResult(f"gave itself a reward of {reward}")
