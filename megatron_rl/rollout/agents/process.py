"""The processes of one episode: started, watched without polling, and ended together, whatever they do."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import IO

from megatron_rl.config.agent import AgentConfig
from megatron_rl.rollout.agents.runner import REWARD_VARIABLE
from megatron_rl.types import Problem

_TAIL = 2000
"""Characters of the standard error that are kept."""


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended."""

    error: str = ""
    """Why it failed; "" where it did not."""
    reward: float | None = None
    """What it gave itself, with `agent.own_reward`."""


class AgentProcess:
    """One agent at work on one problem, in a process group of its own. Linux ends it with the thread that started it."""

    def __init__(self, config: AgentConfig, environment: Mapping[str, str]) -> None:
        """Start it. It waits for its problem."""
        self._config = config
        words = ["function", config.name] if config.name else ["command", *(config.command or ())]
        search_path = [*(path or os.getcwd() for path in sys.path), os.getcwd()]  # as for rewards
        self._reward, remote = os.pipe()
        os.set_blocking(self._reward, False)
        limits = [str(config.memory_mb), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megatron_rl.rollout.agents.runner", *limits, *map(str, words)],
                pass_fds=[remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(search_path),
                    REWARD_VARIABLE: f"/dev/fd/{remote}",
                    **environment,
                },
            )
        finally:
            os.close(remote)

    def kill(self) -> None:
        """End all its processes."""
        if self._process.returncode is None:  # afterwards its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, problem: Problem) -> AgentResult:
        """Give it the problem and return when it has ended, by itself or by `kill` or at its time limit."""
        assert self._process.stdin is not None and self._process.stderr is not None
        pid_fd = os.pidfd_open(self._process.pid)
        try:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(json.dumps({**asdict(problem)}).encode() + b"\n")
            tail, in_time = _watch(pid_fd, self._process.stderr, time.monotonic() + self._config.timeout)
            self.kill()  # it has ended and is not yet waited for, so its group is still its own
            code = self._process.wait()
            if not in_time:
                return AgentResult(f"timeout after {self._config.timeout:g} s")
            if code:
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                last_line = (tail.strip().splitlines() or [""])[-1][:500]
                return AgentResult(f"{how}: {last_line}" if last_line else how)
            return self._read_reward() if self._config.own_reward else AgentResult()
        finally:
            self._process.stderr.close()
            os.close(pid_fd)
            os.close(self._reward)

    def _read_reward(self) -> AgentResult:
        try:
            text = os.read(self._reward, 64).decode(errors="replace")
        except BlockingIOError:  # something that it left behind still holds the pipe
            text = ""
        try:
            reward = float(text)
        except ValueError:
            return AgentResult(f"gave no reward but {text!r}, and agent.own_reward is on")
        return AgentResult(reward=reward) if math.isfinite(reward) else AgentResult(f"gave itself a reward of {reward}")


def _watch(pid_fd: int, stderr: IO[bytes], deadline: float) -> tuple[str, bool]:
    """Return the end of what a process says, and whether it ended before the deadline."""
    os.set_blocking(stderr.fileno(), False)
    poll, tail = select.poll(), b""
    poll.register(pid_fd, select.POLLIN)
    poll.register(stderr.fileno(), select.POLLIN)
    ended = False
    while not ended:
        events = poll.poll(max(deadline - time.monotonic(), 0) * 1000)
        if not events:
            return tail.decode(errors="replace"), False
        ended = any(fd == pid_fd for fd, _ in events)
        if any(fd == stderr.fileno() for fd, _ in events):
            chunk = os.read(stderr.fileno(), 1 << 16)
            tail = (tail + chunk)[-_TAIL:]
            if not chunk:  # closed
                poll.unregister(stderr.fileno())
    return tail.decode(errors="replace"), True
