"""Starts, watches and ends one engine process with everything below it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE

API_KEY_VARIABLE = "MEGATRON_RL_ENGINE_KEY"
"""The run's API key comes by the environment: everybody on a machine can read command lines."""
_TAIL_LINES = 25
_GRACE = 10.0


_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _clean_environment() -> dict[str, str]:
    """This process's environment without torchrun's variables, with which the engine would wait to join the trainer's process group, and
    without all nodes' launchers, of which an engine is told its own."""
    prefixes, others = ("TORCHELASTIC_", "ROLE_"), {*_TORCHRUN, LAUNCHER_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in others and not name.startswith(prefixes)}


class EngineProcess:
    """One server process in a session of its own; its output goes to `log`."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path, module: str = "rollout_sglang.server") -> None:
        self.log = log
        self._has_launcher = bool(environment.get(LAUNCHER_VARIABLE))
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--parent", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_clean_environment(), **environment},
                start_new_session=True,
            )
        self._children: list[psutil.Process] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    def remember_children(self) -> None:
        """Notes the processes below, so that they can be ended even when the server dies before them."""
        with contextlib.suppress(psutil.Error):
            self._children = psutil.Process(self.pid).children(recursive=True)

    def get_memory_mb(self) -> float:
        """MiB resident in all processes together; pages that they share count in each."""
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(self.pid)
            return sum(process.memory_info().rss for process in (server, *server.children(recursive=True))) / 2**20
        return 0.0

    def log_tail(self) -> str:
        """The last lines of the log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return ""

    def wait_for_exit(self, seconds: float) -> bool:
        """Whether the process has ended, or does so in that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
        return self.exit_code() is not None

    def stop(self) -> None:
        """Ends the server and every process below it: politely first, then by force."""
        processes = self._list_processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _kill(psutil.wait_procs(processes, timeout=_GRACE)[1])
        self._process.wait(timeout=_GRACE)

    def kill(self) -> None:
        """As `stop`, at once: for processes that may be stopped or stuck. Python's resource trackers end by themselves, when they have
        cleaned up /dev/shm. A launcher is asked to end all the same: killed, it would leave its engine where it is."""
        if self._has_launcher:
            self.stop()
            return
        processes = self._list_processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()
        _kill(psutil.wait_procs(processes, timeout=_GRACE)[1])
        self._process.wait(timeout=_GRACE)

    def _list_processes(self) -> list[psutil.Process]:
        if self.exit_code() is None:
            self.remember_children()
        processes = list(self._children)
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(self.pid))
        return processes


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=_GRACE)
