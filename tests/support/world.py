"""A world of ranks in processes of their own, which run functions that a test names.

Megatron's CPU patches and SGLang's habit of killing its parents stay out of pytest's process. A function is named by text,
"module:function", so that pytest itself never imports Megatron; it runs on every rank, and modules keep their state between calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.errors import MegatronRLError
from support.processes import end, family, free_port

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
