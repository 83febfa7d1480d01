"""Start, watch and end the server processes of an engine, one on each of its nodes, with all their descendants."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE

API_KEY_VARIABLE = "MEGATRON_RL_ENGINE_KEY"
"""Carries the run's API key: everybody on a machine can read command lines, but not environments."""
THREADS_VARIABLE = "MEGATRON_RL_ENGINE_THREADS"
"""Carries how many threads each of an engine's scheduler processes has on a CPU."""
_TAIL_LINES = 25
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_TORCHRUN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_")


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without torchrun's variables, with which the engine would wait to join the trainer's process
    group, and without the launchers of all nodes, as an engine gets its own."""
    removed = _TORCHRUN_NAMES | {LAUNCHER_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in removed and not name.startswith(_TORCHRUN_PREFIXES)}


class EngineProcess:
    """One server process in a session of its own; its output goes to `log`."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path, module: str = "rollout_sglang.server") -> None:
        self.log = log
        self._has_launcher = bool(environment.get(LAUNCHER_VARIABLE))
        with open(log, "ab") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--parent", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**_clean_environment(), **environment},
                start_new_session=True,
            )
        self._children: list[psutil.Process] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self._process.poll()

    def remember_children(self) -> None:
        """Note all descendants, so that they can be ended even if the server dies first."""
        with contextlib.suppress(psutil.Error):
            self._children = psutil.Process(self.pid).children(recursive=True)

    def get_memory_mb(self) -> float:
        """Return the MiB resident in all processes together; pages that they share count in each."""
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(self.pid)
            return sum(process.memory_info().rss for process in (server, *server.children(recursive=True))) / 2**20
        return 0.0

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return ""

    def stop(self) -> None:
        """End all descendants by SIGTERM, and by SIGKILL those that still run after the grace period; the server ends with them."""
        self._end(psutil.Process.terminate)

    def kill(self) -> None:
        """End the server and all its descendants at once: for processes that may be stopped or stuck.

        Stop a launcher by SIGTERM even so: killed, it would leave its engine running.
        """
        self._end(psutil.Process.terminate if self._has_launcher else _kill)

    def _end(self, end: Callable[[psutil.Process], None]) -> None:
        """Call `end` with each process, wait until they have ended, and kill those that do not in time."""
        if self.exit_code() is None:
            self.remember_children()
        processes = list(self._children)
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(self.pid))
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        if not self._has_launcher:  # a server would wait 5 s, to examine the schedulers that ended
            _wait_for_end([process for process in self._children if not _is_tracker(process)])
            self._process.kill()
        for process in _wait_for_end(processes):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(timeout=_GRACE_SECONDS)
        _wait_for_end(processes)


class EngineProcesses:
    """The server processes of one engine, that of its first node first. The engine is lost with the first of them that ends."""

    def __init__(self, nodes: Sequence[EngineProcess]) -> None:
        self._nodes = nodes
        self._ended: list[EngineProcess] = []

    @property
    def pids(self) -> list[int]:
        return [node.pid for node in self._nodes]

    @property
    def log(self) -> Path:
        """Of the process that ended first, or of the first node."""
        return (self._find_ended() or self._nodes)[0].log

    def has_ended(self) -> bool:
        """Return whether any of the processes has ended."""
        return bool(self._find_ended())

    def wait_for_end(self, seconds: float) -> bool:
        """Return whether any of the processes ends within `seconds`, or has ended."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.has_ended()

    def describe_end(self) -> str:
        """Return how those processes ended that did so first, such as "exit code -9"."""
        many = len(self._nodes) > 1
        return ", ".join(f"exit code {node.exit_code()}" + f" on node {self._nodes.index(node)}" * many for node in self._find_ended())

    def log_tail(self) -> str:
        """Return the last lines of the log of each process that ended first, or of the first node's."""
        return "\n".join(node.log_tail() for node in self._find_ended() or self._nodes[:1])

    def remember_children(self) -> None:
        for node in self._nodes:
            node.remember_children()

    def get_memory_mb(self) -> float:
        return sum(node.get_memory_mb() for node in self._nodes)

    def stop(self) -> None:
        """See `EngineProcess.stop`; all nodes at a time."""
        self._end(EngineProcess.stop)

    def kill(self) -> None:
        """See `EngineProcess.kill`; all nodes at a time."""
        self._end(EngineProcess.kill)

    def _end(self, end: Callable[[EngineProcess], None]) -> None:
        self._find_ended()  # those that are ended here are no failures
        with ThreadPoolExecutor(len(self._nodes)) as threads:
            list(threads.map(end, self._nodes))

    def _find_ended(self) -> list[EngineProcess]:
        """Return the processes that had ended when one was first seen to have ended."""
        self._ended = self._ended or [node for node in self._nodes if node.exit_code() is not None]
        return self._ended


def _wait_for_end(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for the grace period at most. Return those that still run; one that its parent has not asked for has ended."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (running := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return running


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill(process: psutil.Process) -> None:
    if not _is_tracker(process):
        process.kill()


def _is_tracker(process: psutil.Process) -> bool:
    """Is it one of Python's resource trackers, which end by themselves once they have cleaned up /dev/shm?"""
    with contextlib.suppress(psutil.Error):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False
