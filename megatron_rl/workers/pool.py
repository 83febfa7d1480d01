"""Worker processes that judge completions, or do other work on each: a sample can hang, crash or exhaust memory, and costs only itself.

Each worker is a fresh interpreter with a pipe of its own. multiprocessing and the libraries on top of it would import the caller's
`__main__`, and with it torch and Megatron, into every worker; their shared queues break with the first worker that is killed. Samples
travel in small chunks and come back one by one, so a worker is at its oldest unanswered sample, and the time since its last answer is
that sample's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from typing import Any, Generic, Self, TypeVar

from megatron_rl.errors import RunError
from megatron_rl.types import Problem, Reward

LARGEST_CHUNK = 16
"""Samples sent to a worker at once."""
START_TIMEOUT = 120.0
"""Seconds a worker may take to load its functions."""
MOST_FAILED_STARTS = 3
"""The run ends after this many failed starts per worker in a row."""

RewardFunctionSpec = tuple[str, Mapping[str, str]]
"""Name and settings, as `megatron_rl.rewards.load_function` takes them."""
VerdictT = TypeVar("VerdictT")


class _Call(Generic[VerdictT]):
    """The samples of one call of `WorkerPool.score`."""

    def __init__(self, count: int) -> None:
        self.count, self.failed = count, False
        self.verdicts: dict[int, VerdictT] = {}

    @property
    def has_ended(self) -> bool:
        return self.failed or len(self.verdicts) == self.count


@dataclass(frozen=True)
class _Sample(Generic[VerdictT]):
    """One sample, the `number`-th of its call."""

    call: _Call[VerdictT]
    number: int
    text: str
    problem: Any

    def end(self, verdict: VerdictT) -> None:
        self.call.verdicts[self.number] = verdict


class WorkerPool(Generic[VerdictT]):
    """Hands samples to `workers` processes; use it as a context manager.

    A subclass names its section of the configuration and the module that a worker runs (with `megatron_rl.rewards.worker.serve`), and
    makes the verdict of a sample without an answer. `argument` tells the workers what to load. `timeout`: seconds for one sample.
    `memory_mb`: address space of a worker in MiB. Entering starts the workers without waiting for them.
    """

    section: str
    module: str

    def make_failure(self, reason: str) -> VerdictT:
        raise NotImplementedError

    def __init__(self, argument: str, workers: int, timeout: float, memory_mb: int) -> None:
        self._argument, self._count, self._timeout, self._memory_mb = argument, workers, timeout, memory_mb
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._waiting: deque[_Sample[VerdictT]] = deque()
        """The samples that no worker has."""
        self._changed = threading.Condition()
        self._driven = False
        """Whether a thread is talking to the workers; it does so for all threads that call."""
        self._woken, self._wake = Pipe(duplex=False)

    def __enter__(self) -> Self:
        self._start_missing()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later `score` would start new ones."""
        for worker in list(self._workers):
            self._discard(worker)

    def wait_until_ready(self) -> None:
        """Return when all workers are loaded. Raise RunError when one cannot load."""
        while not all(worker.ready for worker in self._workers):
            self._collect()
            self._start_missing()

    def score(self, texts_B: Sequence[str], problems_B: Sequence[Problem]) -> list[VerdictT]:
        """Return the verdicts on the texts, in their order. May be called by several threads, whose samples share the workers.

        A sample without one gets `make_failure` of the reason: "timeout after 5 s", "worker died (signal 9)" or the function's own error
        such as "ValueError: ...". Raise RunError when workers cannot be started at all.
        """
        call = _Call[VerdictT](len(texts_B))
        with self._changed:
            self._waiting.extend(_Sample(call, *sample) for sample in zip(range(len(texts_B)), texts_B, problems_B, strict=True))
            if self._driven:
                self._wake.send(None)  # whoever drives may have an idle worker for them
        while self._may_drive(call):
            try:
                self._start_missing()
                self._dispatch()
                self._collect()
            except BaseException:
                self._drop_everything()
                raise
            finally:
                with self._changed:
                    self._driven = False
                    self._changed.notify_all()
        if call.failed:
            raise RunError(f"the {self.section} workers were lost in another thread")
        return [call.verdicts[number] for number in range(len(texts_B))]

    def _may_drive(self, call: _Call[VerdictT]) -> bool:
        """Wait until the call has ended, and return False; or until no other thread drives the workers, and return True."""
        with self._changed:
            self._changed.wait_for(lambda: call.has_ended or not self._driven)
            if call.has_ended:
                return False
            self._driven = True
            return True

    def _drop_everything(self) -> None:
        """After an error: nobody awaits the workers' answers, and every call ends."""
        with self._changed:
            for sample in [*self._waiting, *(sample for worker in self._workers for sample in worker.samples)]:
                sample.call.failed = True
            self._waiting.clear()
        for worker in [worker for worker in self._workers if worker.samples]:
            self._discard(worker)

    def _start_missing(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self.module, self._argument, self._memory_mb))

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def _dispatch(self) -> None:
        """Give every idle worker a chunk, smaller ones towards the end so that all finish together."""
        for worker in [worker for worker in self._workers if worker.ready and not worker.samples]:
            with self._changed:
                size = min(LARGEST_CHUNK, -(-len(self._waiting) // (2 * self._count)))
                chunk = [self._waiting.popleft() for _ in range(size)]
            if chunk and not worker.send(chunk, self._timeout):
                self._replace(worker, "")  # it died while idle, which is no sample's fault

    def _collect(self) -> None:
        """Wait for the next answer or deadline, then take all answers that have arrived and replace the workers that are late."""
        busy = [worker for worker in self._workers if worker.samples or not worker.ready]
        if not busy:
            return
        seconds = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        answering = wait([self._woken, *(worker.channel for worker in busy)], seconds)
        while self._woken.poll():
            self._woken.recv()
        for worker in busy:
            if worker.channel in answering:
                self._receive(worker)
            elif time.monotonic() > worker.deadline and not worker.channel.poll():
                self._replace(worker, f"timeout after {self._timeout:g} s" if worker.ready else f"not ready after {START_TIMEOUT:g} s")

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.channel.recv()
        except (EOFError, OSError):
            self._replace(worker, worker.cause_of_death())
            return
        if worker.ready:
            worker.samples.popleft().end(message)
            worker.deadline = time.monotonic() + self._timeout
            return
        state, reason = message
        if state != "ready":
            raise RunError(f"a {self.section} worker with {self._memory_mb} MiB could not load its functions: {reason}")
        worker.ready, self._failed_starts = True, 0

    def _replace(self, worker: _Worker, reason: str) -> None:
        """Drop a worker: the sample it was at fails for `reason`, where there is one; the others go back to the queue's front."""
        if worker.samples and reason:
            worker.samples.popleft().end(self.make_failure(reason))
        with self._changed:
            self._waiting.extendleft(reversed(worker.samples))
        self._failed_starts += not worker.ready
        self._discard(worker)
        if self._failed_starts >= MOST_FAILED_STARTS * self._count:
            raise RunError(f"{self.section} workers do not start: {reason} ({self.section}.memory_mb = {self._memory_mb})")


class RewardPool(WorkerPool[list[Reward]]):
    """Judges completions: every worker runs all `functions`, and a verdict is one Reward per function.

    A function without a verdict gives Reward(0.0, False, error): its own error, or for all functions of a sample the worker's.
    """

    section, module = "reward", "megatron_rl.rewards.worker"

    def __init__(self, functions: Sequence[RewardFunctionSpec], workers: int, timeout: float, memory_mb: int) -> None:
        self._functions = functions
        super().__init__(json.dumps(functions), workers, timeout, memory_mb)

    def make_failure(self, reason: str) -> list[Reward]:
        return [Reward(0.0, False, error=reason)] * len(self._functions)


class _Worker:
    """One process, its pipe, and the samples that it was sent and has not answered."""

    def __init__(self, module: str, argument: str, memory_mb: int) -> None:
        self.channel, remote = Pipe()
        search_path = [*(path or os.getcwd() for path in sys.path), os.getcwd()]  # a user's function may be in the working directory
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(remote.fileno()), argument, str(memory_mb), str(os.getpid())],
            pass_fds=[remote.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path), "OMP_NUM_THREADS": "1"},
        )
        remote.close()
        self.ready = False
        self.samples: deque[_Sample[Any]] = deque()
        self.deadline = time.monotonic() + START_TIMEOUT

    def send(self, chunk: list[_Sample[Any]], timeout: float) -> bool:
        """Send samples to this idle worker; return False when its process is gone."""
        self.samples.extend(chunk)
        self.deadline = time.monotonic() + timeout
        try:
            self.channel.send([(sample.text, sample.problem) for sample in chunk])
        except OSError:
            return False
        return True

    def cause_of_death(self) -> str:
        """Return why the process ended, such as "worker died (signal 9)"; its pipe has closed, so it is gone or about to be."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "worker closed its pipe"
        return f"worker died (signal {-code})" if code < 0 else f"worker died (exit code {code})"

    def end(self) -> None:
        """Kill the process and release its resources."""
        self.channel.close()
        self._process.kill()
        self._process.wait()
