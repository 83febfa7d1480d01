"""Processes whose every wait is bounded, and the question whether any of them outlived its time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def one_thread_environment() -> dict[str, str]:
    """The environment of a process that shares two cores with others; without the ranks of a torchrun around pytest."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "400"}


class Command:
    """A running Python command, `python -m ARGUMENTS`; ended with everything below it at the end of the `with` block."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / "stdout", folder / "stderr"]
        with open(self._files[0], "wb") as out, open(self._files[1], "wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *map(str, arguments)],
                cwd=ROOT,
                env=one_thread_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        end(family(self.pid))
        self._process.wait(timeout=10)

    def wait(self, seconds: float) -> Done:
        """Raises AssertionError, with what was printed, when the command does not end in time."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {seconds} s\n{self._texts()}") from None
        return Done(code, *self._texts())

    def ended(self) -> bool:
        return self._process.poll() is not None

    def _texts(self) -> tuple[str, str]:
        out, err = (file.read_text(errors="replace") for file in self._files)
        return out, err


def family(pid: int) -> list[psutil.Process]:
    """A process and everything below it; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def command_lines(processes: Iterable[psutil.Process]) -> dict[psutil.Process, list[str]]:
    """Each process with its command line; without those that are gone, zombies among them."""
    found = {}
    for process in processes:
        with suppress(psutil.Error):
            found[process] = process.cmdline()
    return found


def end(processes: Iterable[psutil.Process]) -> None:
    """Kills processes that may be gone already, but see `but_trackers`."""
    for process in but_trackers(processes):
        with suppress(psutil.Error):
            process.kill()


def but_trackers(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Without Python's resource trackers, which end with the others, after they have cleaned up /dev/shm."""
    found = command_lines(processes)
    return [process for process, words in found.items() if not any("multiprocessing.resource_tracker" in word for word in words)]


def alive_after(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after at most `seconds`. A zombie does not run; psutil knows a reused pid from the old process."""
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits for a condition. Raises AssertionError naming `what` when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
