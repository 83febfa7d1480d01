"""Processes of tests: worlds of gloo ranks that run functions on call, and commands that end with all they started."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.errors import MegatronRLError

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


_SILENT = "no answer: still busy, or its process ended"


class World:
    """`size` ranks, as torchrun would start them; a world of one has no torchrun around it. Close it, or use `with`."""

    def __init__(self, size: int, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._logs = [folder / f"rank{rank}.log" for rank in range(size)]
        port = free_port()
        self._pipes: list[Connection] = []
        self._ranks = []
        for rank, log in enumerate(self._logs):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, log, _environment(rank, size, port)))
            process.start()
            there.close()
            self._pipes.append(here)
            self._ranks.append(process)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pid(self, rank: int = 0) -> int:
        return self._ranks[rank].pid or 0

    def family(self) -> list[psutil.Process]:
        """All ranks and everything below them."""
        return [process for rank in range(len(self._ranks)) for process in family(self.pid(rank))]

    def call(self, function: str, *args: Any, seconds: float = 240) -> list[Any]:
        """Runs a function on every rank; returns the ranks' results.

        An expected error (MegatronRLError) that every rank raised is raised here. Anything else that goes wrong, a wait of more than
        `seconds` included, is an AssertionError that shows what the ranks raised and printed. A world whose ranks may wait for each
        other then is ended.
        """
        self.send(function, *args)
        return self.receive(seconds)

    def send(self, function: str, *args: Any) -> None:
        """The first half of `call`, for worlds that work at the same time."""
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # a rank that ended: told below
                pipe.send((function, args))

    def receive(self, seconds: float) -> list[Any]:
        """The second half of `call`."""
        answers = [self._answer(pipe, seconds) for pipe in self._pipes]
        if all(isinstance(error, MegatronRLError) for _, error in answers):
            raise answers[0][1]
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error is not None]
        if failed:
            if any(error == _SILENT for _, error in answers) or 0 < len(failed) < len(answers):
                self.close()
            self._fail(failed, seconds)
        return [result for result, _ in answers]

    def close(self) -> None:
        """Ends the ranks and everything below them."""
        end(self.family())
        for process in self._ranks:
            process.join(10)

    def _answer(self, pipe: Connection, seconds: float) -> tuple[Any, Any]:
        try:
            if pipe.poll(seconds):
                return pipe.recv()
        except (EOFError, ConnectionError):
            pass
        return None, _SILENT

    def _fail(self, failed: list[str], seconds: float) -> None:
        printed = [f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in self._logs]
        raise AssertionError("\n".join([f"within {seconds} s:", *failed, *printed]))


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if size == 1:
        return threads
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return threads | {name: str(value) for name, value in place.items()}


def _serve(pipe: Connection, log: Path, environment: dict[str, str]) -> None:
    """A rank's life: run what is asked, answer (result, error), until the pipe closes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        module, _, function = name.partition(":")
        try:
            answer = (getattr(importlib.import_module(module), function)(*args), None)
        except MegatronRLError as error:
            answer = (None, error)
        except BaseException:
            answer = (None, traceback.format_exc())
        pipe.send(answer)
        del args, answer
        _give_memory_back()


def _give_memory_back() -> None:
    """A dozen ranks wait for their next test at a time; what glibc keeps of their last one's models adds up to gigabytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
