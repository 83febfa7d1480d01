"""Worker processes that judge completions, or do other work on each: a sample can hang, crash or exhaust memory, and costs only itself.

Each worker is a fresh interpreter with a pipe. multiprocessing's own process start is avoided: it would import the caller's
`__main__`, and with it torch and Megatron, into every worker. Samples travel in small chunks and come back one by one, so the
oldest unanswered sample of a worker is the one it works on, and the time since its last answer is that sample's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Generic, Self, TypeVar

from megatron_rl.errors import RunError
from megatron_rl.types import Problem, Reward

LARGEST_CHUNK = 16
"""Samples sent to a worker at once."""
START_TIMEOUT = 120.0
"""Seconds a worker may take to load what it runs."""
MOST_FAILED_STARTS = 3
"""This many losses in a row for each worker, none of which became ready, break the run."""

RewardFunctionSpec = tuple[str, Mapping[str, str]]
"""Name and settings, as `megatron_rl.rewards.load_function` takes them."""
ScoringJob = Sequence[tuple[str, Problem]]
VerdictT = TypeVar("VerdictT")


class WorkerPool(Generic[VerdictT]):
    """Gives samples to `workers` processes; use it as a context manager. Not to be shared between threads.

    A subclass names its section of the configuration and the module that a worker runs (with `megatron_rl.rewards.worker.serve`), and
    says what a sample without an answer gets. `runs` tells the workers what to load. `timeout`: seconds for one sample.
    `memory_mb`: address space of a worker in MiB. Entering starts the workers without waiting for them.
    """

    section: str
    module: str

    def make_failure(self, reason: str) -> VerdictT:
        raise NotImplementedError

    def __init__(self, runs: str, workers: int, timeout: float, memory_mb: int) -> None:
        self._runs, self._count, self._timeout, self._memory_mb = runs, workers, timeout, memory_mb
        self._workers: list[_Worker] = []
        self._failed_starts = 0

    def __enter__(self) -> Self:
        self._start_missing()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later `score` would start new ones."""
        self._discard(list(self._workers))

    def wait_until_ready(self) -> None:
        """Returns when all workers have loaded what they run. Raises RunError when one cannot."""
        while not all(worker.ready for worker in self._workers):
            self._collect({}, deque())
            self._start_missing()

    def score(self, texts_B: Sequence[str], problems_B: Sequence[Problem]) -> list[VerdictT]:
        """The verdicts on the texts, in their order.

        A sample without one gets what `failed` says: "timeout after 5 s", "worker died (signal 9)" or the function's
        own error such as "ValueError: ...". Raises RunError when workers cannot be started at all.
        """
        job: ScoringJob = list(zip(texts_B, problems_B, strict=True))
        verdicts: dict[int, VerdictT] = {}
        waiting = deque(range(len(job)))
        try:
            while len(verdicts) < len(job):
                self._start_missing()
                self._dispatch(job, waiting)
                self._collect(verdicts, waiting)
        finally:
            self._discard([worker for worker in self._workers if worker.outstanding])  # after an error: answers nobody awaits
        return [verdicts[index] for index in range(len(job))]

    def _start_missing(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self.module, self._runs, self._memory_mb))

    def _discard(self, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.end()

    def _dispatch(self, job: ScoringJob, waiting: deque[int]) -> None:
        """Give every idle worker a chunk, smaller ones towards the end so that all finish together."""
        for worker in [worker for worker in self._workers if worker.ready and not worker.outstanding]:
            size = min(LARGEST_CHUNK, -(-len(waiting) // (2 * self._count)))
            chunk = [waiting.popleft() for _ in range(size)]
            if chunk and not worker.send(chunk, job, time.monotonic() + self._timeout):
                self._replace(worker, "", {}, waiting)  # it died while idle: that is no sample's fault

    def _collect(self, verdicts: dict[int, VerdictT], waiting: deque[int]) -> None:
        """Wait for the next answer or deadline, then take all answers that are there and give up on workers that are late."""
        engaged = [worker for worker in self._workers if worker.outstanding or not worker.ready]
        if not engaged:
            return
        patience = max(0.0, min(worker.deadline for worker in engaged) - time.monotonic())
        answering = wait([worker.channel for worker in engaged], patience)
        for worker in engaged:
            if worker.channel in answering:
                self._receive(worker, verdicts, waiting)
            elif time.monotonic() > worker.deadline and not worker.channel.poll():
                late = f"timeout after {self._timeout:g} s" if worker.ready else f"not ready after {START_TIMEOUT:g} s"
                self._replace(worker, late, verdicts, waiting)

    def _receive(self, worker: _Worker, verdicts: dict[int, VerdictT], waiting: deque[int]) -> None:
        try:
            message = worker.channel.recv()
        except (EOFError, OSError):
            self._replace(worker, worker.cause_of_death(), verdicts, waiting)
            return
        if not worker.ready:
            worker.become_ready(message, self.section, self._memory_mb)
            self._failed_starts = 0
            return
        verdicts[worker.outstanding.popleft()] = message
        worker.deadline = time.monotonic() + self._timeout

    def _replace(self, worker: _Worker, reason: str, verdicts: dict[int, VerdictT], waiting: deque[int]) -> None:
        """Drop a worker; the sample it worked on takes the blame, those behind it go back to the queue's front."""
        if worker.outstanding and reason:
            verdicts[worker.outstanding.popleft()] = self.make_failure(reason)
        self._failed_starts += not worker.ready
        waiting.extendleft(reversed(worker.outstanding))
        self._discard([worker])
        if self._failed_starts >= MOST_FAILED_STARTS * self._count:
            raise RunError(f"{self.section} workers do not start: {reason} ({self.section}.memory_mb = {self._memory_mb})")


class RewardPool(WorkerPool[list[Reward]]):
    """Judges completions: every worker runs all `functions`, and a verdict is one Reward per function.

    Where a function has no verdict, there is Reward(0.0, False, error): its own error; or for all functions of a sample the worker's.
    """

    section, module = "reward", "megatron_rl.rewards.worker"

    def __init__(self, functions: Sequence[RewardFunctionSpec], workers: int, timeout: float, memory_mb: int) -> None:
        self._functions = functions
        super().__init__(json.dumps(functions), workers, timeout, memory_mb)

    def make_failure(self, reason: str) -> list[Reward]:
        return [Reward(0.0, False, error=reason)] * len(self._functions)


class _Worker:
    """One process, its pipe, and the indices of the samples it has been sent but not answered."""

    def __init__(self, module: str, runs: str, memory_mb: int) -> None:
        self.channel, remote = Pipe()
        arguments = [str(remote.fileno()), runs, str(memory_mb), str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": _search_path(), "OMP_NUM_THREADS": "1"},
        )
        remote.close()
        self.ready = False
        self.outstanding: deque[int] = deque()
        self.deadline = time.monotonic() + START_TIMEOUT

    def send(self, chunk: list[int], job: ScoringJob, deadline: float) -> bool:
        """Send an idle worker samples; False when it is gone."""
        self.outstanding.extend(chunk)
        self.deadline = deadline
        try:
            self.channel.send([job[index] for index in chunk])
        except OSError:
            return False
        return True

    def become_ready(self, message: tuple[str, str], section: str, memory_mb: int) -> None:
        """Take the worker's first message, (state, reason). Raises RunError when it could not load what it runs."""
        state, reason = message
        if state != "ready":
            raise RunError(f"a {section} worker with {memory_mb} MiB could not load its functions: {reason}")
        self.ready = True

    def cause_of_death(self) -> str:
        """Why the process ended, e.g. "worker died (signal 9)"; its pipe has closed, so it is gone or about to be."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "worker closed its pipe"
        return f"worker died (signal {-code})" if code < 0 else f"worker died (exit code {code})"

    def end(self) -> None:
        """Kill the process and free what it held."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


def _search_path() -> str:
    """Where a worker looks for modules: as this process does, and last in the working directory, where a user's function may lie."""
    return os.pathsep.join([*(path or os.getcwd() for path in sys.path), os.getcwd()])
