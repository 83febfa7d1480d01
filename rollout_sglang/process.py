"""Server processes of an engine, one on each of its nodes: starts, watches and ends them with all their descendants."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from megatron_rl.errors import RunError
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE
from megatron_rl.workers.keeper import is_tracker

API_KEY_VARIABLE = "MEGATRON_RL_ENGINE_KEY"
"""Environment variable with the API key. Command lines are readable by all users of a machine, environments are not."""
THREADS_VARIABLE = "MEGATRON_RL_ENGINE_THREADS"  # environment variable with the number of threads of each scheduler process on a CPU
_TAIL_LINES = 25
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_TORCHRUN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "ROLE_")
_MAX_INTERVAL = 5.0


def _clean_environment() -> dict[str, str]:
    """Return this process's environment without torchrun's variables, with which an engine would join the trainer, and launchers."""
    removed = _TORCHRUN_NAMES | {LAUNCHER_VARIABLE}
    return {name: value for name, value in os.environ.items() if name not in removed and not name.startswith(_TORCHRUN_PREFIXES)}


def _open_private(path: str, flags: int) -> int:
    """Open a file that only this user can read."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


class EngineProcess:
    """One server process in its own session. Its output goes to `log`."""

    def __init__(self, arguments: list[str], environment: dict[str, str], log: Path, module: str = "rollout_sglang.server") -> None:
        self.log = log
        self._has_launcher = bool(environment.get(LAUNCHER_VARIABLE))
        with open(log, "ab", opener=_open_private) as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--parent", str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env={**_clean_environment(), **environment},
                start_new_session=True,
            )
        self._children: list[psutil.Process] = []

        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.poll()

    def remember_children(self) -> None:
        """Record all descendants, so that they can be ended even if the server dies first."""
        with contextlib.suppress(psutil.Error):
            self._children = psutil.Process(self.pid).children(recursive=True)

    def get_memory_mb(self) -> float:
        """Return the resident MiB of the server and its remembered descendants together. Shared pages count in each process. Finding
        descendants reads every process of the machine, so it is repeated only if one has ended."""
        for _ in range(2):
            with contextlib.suppress(psutil.Error):
                return sum(process.memory_info().rss for process in (psutil.Process(self.pid), *self._children)) / 2**20
            self.remember_children()
        return 0.0

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace", encoding="utf-8").splitlines()[-_TAIL_LINES:])
        return ""

    def stop(self) -> None:
        """Send SIGTERM to all descendants, and SIGKILL to those still running after the grace period. The server ends with them."""
        self._end(psutil.Process.terminate)

    def kill(self) -> None:
        """Kill the server and all its descendants immediately. A launcher gets SIGTERM; killing it would leave its engine running."""
        self._end(psutil.Process.terminate if self._has_launcher else _kill)

    def _end(self, end: Callable[[psutil.Process], None]) -> None:
        """Call `end` with each process, wait until they have ended, and kill those that do not end in time."""
        if self.exit_code() is None:
            self.remember_children()
        processes = list(self._children)
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(self.pid))
        for process in processes:
            with contextlib.suppress(psutil.Error):
                end(process)
        if not self._has_launcher:  # a server would wait 5 s to examine the ended schedulers
            _wait_for_end([process for process in self._children if not is_tracker(process.pid)])
            self._process.kill()
        for process in _wait_for_end(processes):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(timeout=_GRACE_SECONDS)
        _wait_for_end(processes)


class EngineProcesses:
    """The server processes of one engine, starting with its first node. The engine is lost when any of them ends."""

    def __init__(self, nodes: Sequence[EngineProcess]) -> None:
        self._nodes = nodes
        self._ended: list[EngineProcess] = []

    @property
    def pids(self) -> list[int]:
        return [node.pid for node in self._nodes]

    @property
    def log(self) -> Path:
        """Log of the process that ended first, or of the first node."""
        return (self._find_ended() or self._nodes)[0].log

    def has_ended(self) -> bool:
        """Return whether any of the processes has ended."""
        return bool(self._find_ended())

    def wait_for_end(self, seconds: float) -> bool:
        """Return whether any of the processes has ended or ends within `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return self.has_ended()

    def describe_end(self) -> str:
        """Describe how the processes that ended first ended, such as "exit code -9"."""
        many = len(self._nodes) > 1
        return ", ".join(f"exit code {node.exit_code()}" + f" on node {self._nodes.index(node)}" * many for node in self._find_ended())

    def log_tail(self) -> str:
        """Return the last lines of the log of each process that ended first, or of the first node."""
        return "\n".join(node.log_tail() for node in self._find_ended() or self._nodes[:1])

    def remember_children(self) -> None:
        for node in self._nodes:
            node.remember_children()

    def get_memory_mb(self) -> float:
        return sum(node.get_memory_mb() for node in self._nodes)

    def stop(self) -> None:
        self._end(EngineProcess.stop)

    def kill(self) -> None:
        self._end(EngineProcess.kill)

    def _end(self, end: Callable[[EngineProcess], None]) -> None:
        self._find_ended()  # processes ended below are not failures
        with ThreadPoolExecutor(len(self._nodes)) as threads:
            list(threads.map(end, self._nodes))

    def _find_ended(self) -> list[EngineProcess]:
        """Return the processes that had ended when an end was first noticed."""
        self._ended = self._ended or [node for node in self._nodes if node.exit_code() is not None]
        return self._ended


def _wait_for_end(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Wait for at most the grace period. Return the processes that still run; a zombie has ended."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while (running := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return running


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _kill(process: psutil.Process) -> None:
    if not is_tracker(process.pid):
        process.kill()


class HealthMonitor:
    """Calls `ping` while the engine works, and `on_unresponsive` once if `ping` raises RunError, which it must after `seconds` without
    an answer. A hang is noticed within twice `seconds`. Any number of threads may work; one additional thread pings."""

    def __init__(self, ping: Callable[[], object], on_unresponsive: Callable[[], None], seconds: float) -> None:
        self._ping, self._on_unresponsive, self._interval = ping, on_unresponsive, min(seconds, _MAX_INTERVAL)
        self._lock = threading.Lock()
        self._workers = 0
        self._stop_event = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Enclose work of the engine."""
        with self._lock:
            self._workers += 1
            if self._workers == 1:
                self._stop_event = threading.Event()
                threading.Thread(target=self._run, args=(self._stop_event,), name="megatron-rl-watch", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._workers -= 1
                if self._workers == 0:
                    self._stop_event.set()

    def _run(self, stop_event: threading.Event) -> None:
        while not stop_event.wait(self._interval):
            try:
                self._ping()
            except RunError:
                if not stop_event.is_set():
                    self._on_unresponsive()
                return
