"""Pool of worker processes. A task that hangs, crashes or exhausts memory fails alone. Each worker is a fresh interpreter with its own
pipe. multiprocessing would import the caller's `__main__`, and with it torch and Megatron, into every worker, and its shared queues break
when a worker is killed. Tasks travel in small chunks and results come back one by one, so a worker is always running its oldest unanswered
task, and the time since its last answer is the time spent on that task."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from typing import Any, Generic, Self, TypeVar

from megatron_rl.errors import RunError

LARGEST_CHUNK = 16  # maximum number of tasks sent to a worker at once
START_TIMEOUT = 120.0  # seconds a worker may take to load its handler, and again for its first task of a kind: many functions load then
MOST_FAILED_STARTS = 3  # number of consecutive failed starts per worker after which the run ends

ResultT = TypeVar("ResultT")


class _Call(Generic[ResultT]):
    """A call of `WorkerPool.run`."""

    def __init__(self, count: int) -> None:
        self.count, self.failed = count, False
        self.results: dict[int, ResultT] = {}

    @property
    def has_ended(self) -> bool:
        return self.failed or len(self.results) == self.count


@dataclass(frozen=True)
class _Task(Generic[ResultT]):
    call: _Call[ResultT]
    number: int
    arguments: tuple[Any, ...]
    kind: object


class WorkerPool(Generic[ResultT]):
    """Distributes tasks to worker processes. A context manager; entering starts the workers without waiting for them. A subclass sets
    `section`, its section of the configuration, and `module`, which the workers run and which calls `megatron_rl.workers.process.serve`
    with `argument`. `timeout`: seconds allowed for one task, except a worker's first of a kind. `memory_mb`: address space of a worker in
    MiB."""

    section: str
    module: str

    def make_failure(self, reason: str) -> ResultT:
        """Return the result of a task that has no answer."""
        raise NotImplementedError

    def find_kind(self, *arguments: Any) -> object:
        """Return the kind of a task, for each of which a handler may have to load something."""
        return None

    def __init__(self, argument: str, workers: int, timeout: float, memory_mb: int) -> None:
        self._argument, self._count, self._timeout, self._memory_mb = argument, workers, timeout, memory_mb
        self._first_timeout, self._slowest_first = max(timeout, START_TIMEOUT), 0.0  # limit and longest duration of first tasks
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._waiting: deque[_Task[ResultT]] = deque()  # tasks not yet sent to a worker
        self._changed = threading.Condition()
        self._driven = False  # whether a thread is communicating with the workers, on behalf of all calling threads
        self._woken, self._wake = Pipe(duplex=False)

    def __enter__(self) -> Self:
        self._start_missing()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Terminate the workers. A later call of `run` starts new ones."""
        for worker in list(self._workers):
            self._discard(worker)

    def wait_until_ready(self) -> None:
        """Wait until all workers have loaded their handler. Raise RunError if one cannot load it."""
        while not all(worker.ready for worker in self._workers):
            self._collect()
            self._start_missing()

    def run(self, tasks: Sequence[tuple[Any, ...]]) -> list[ResultT]:
        """Return the handler's results for the tasks, in order. Each task is a tuple of picklable arguments. Thread-safe. The result of
        a task without an answer is `make_failure` of the reason, such as "timeout after 5 s" or "worker died (signal 9)". Raise RunError
        if the workers cannot be started."""
        call = _Call[ResultT](len(tasks))
        with self._changed:
            self._waiting.extend(_Task(call, number, each, self.find_kind(*each)) for number, each in enumerate(tasks))
            if self._driven:
                self._wake.send(None)  # the driving thread may have an idle worker
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
        return [call.results[number] for number in range(len(tasks))]

    def _may_drive(self, call: _Call[ResultT]) -> bool:
        """Return False once the call has ended, or True once no other thread drives the workers."""
        with self._changed:
            self._changed.wait_for(lambda: call.has_ended or not self._driven)
            if call.has_ended:
                return False
            self._driven = True
            return True

    def _drop_everything(self) -> None:
        """Fail all calls after an error, and terminate the busy workers, whose answers nobody awaits."""
        with self._changed:
            for task in [*self._waiting, *(task for worker in self._workers for task in worker.tasks)]:
                task.call.failed = True
            self._waiting.clear()
        for worker in [worker for worker in self._workers if worker.tasks]:
            self._discard(worker)

    def _start_missing(self) -> None:
        while len(self._workers) < self._count:
            self._workers.append(_Worker(self.module, self._argument, self._memory_mb))

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def _dispatch(self) -> None:
        """Send every idle worker a chunk. Chunks shrink toward the end so that all workers finish together."""
        for worker in [worker for worker in self._workers if worker.ready and not worker.tasks]:
            with self._changed:
                size = min(LARGEST_CHUNK, -(-len(self._waiting) // (2 * self._count)))
                chunk = [self._waiting.popleft() for _ in range(size)]
            if chunk and not worker.send(chunk, self._find_limit(worker, chunk[0])):
                self._replace(worker, "")  # it died while idle, so no task is at fault

    def _find_limit(self, worker: _Worker, task: _Task[ResultT]) -> float:
        return self._timeout if task.kind in worker.known else self._first_timeout

    def _collect(self) -> None:
        """Wait for the next answer or deadline, take all answers that have arrived, and replace late workers."""
        busy = [worker for worker in self._workers if worker.tasks or not worker.ready]
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
                if worker.ready and worker.tasks[0].kind not in worker.known:
                    # the task probably hangs; many that hang must not take this long each
                    self._first_timeout = max(self._timeout, 2 * self._slowest_first, self._first_timeout / 2)
                self._replace(worker, f"{'timeout' if worker.ready else 'not ready'} after {worker.limit:g} s")

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.channel.recv()
        except (EOFError, OSError):
            self._replace(worker, worker.cause_of_death())
            return
        if worker.ready:
            task = worker.tasks.popleft()
            task.call.results[task.number] = message
            if task.kind not in worker.known:
                worker.known.add(task.kind)
                self._slowest_first = max(self._slowest_first, time.monotonic() - worker.deadline + worker.limit)
            if worker.tasks:
                worker.expect_answer(self._find_limit(worker, worker.tasks[0]))
            return
        state, reason = message
        if state != "ready":
            raise RunError(f"a {self.section} worker with {self._memory_mb} MiB could not load its functions: {reason}")
        worker.ready, self._failed_starts = True, 0

    def _replace(self, worker: _Worker, reason: str) -> None:
        """Drop a worker. If there is a `reason`, its current task fails; its other tasks return to the front of the queue."""
        if worker.tasks and reason:
            task = worker.tasks.popleft()
            task.call.results[task.number] = self.make_failure(reason)
        with self._changed:
            self._waiting.extendleft(reversed(worker.tasks))
        self._failed_starts += not worker.ready
        self._discard(worker)
        if self._failed_starts >= MOST_FAILED_STARTS * self._count:
            raise RunError(f"{self.section} workers do not start: {reason} ({self.section}.memory_mb = {self._memory_mb})")


class _Worker:
    """One worker process, its pipe, and the tasks that it has not answered yet."""

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
        self.known = set[object]()  # kinds of the tasks that it has answered
        self.tasks: deque[_Task[Any]] = deque()
        self.expect_answer(START_TIMEOUT)

    def expect_answer(self, limit: float) -> None:
        """Set the deadline of the next message to `limit` seconds from now."""
        self.limit, self.deadline = limit, time.monotonic() + limit

    def send(self, chunk: list[_Task[Any]], timeout: float) -> bool:
        """Send tasks to this idle worker. Return False if its process is gone."""
        self.tasks.extend(chunk)
        self.expect_answer(timeout)
        try:
            self.channel.send([task.arguments for task in chunk])
        except OSError:
            return False
        return True

    def cause_of_death(self) -> str:
        """Return why the process, whose pipe has closed, ended, such as "worker died (signal 9)"."""
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
