"""Pool of worker processes. A task that hangs, crashes or exhausts memory fails alone. Each worker is a fresh interpreter with its own
socket. multiprocessing would import the caller's `__main__`, and with it torch and Megatron, into every worker, and its shared queues break
when a worker is killed. Tasks travel in small chunks and results come back one by one, so a worker is always running its oldest unanswered
task, and the time since its last answer is the time spent on that task.

A worker that ran out of memory, threads or descriptors, or answered out of turn, is replaced. If it had answered other tasks before, these
may be to blame, so the task that failed runs once more as the first task of a new worker, and what happens there counts."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from megatron_rl.errors import RunError
from megatron_rl.workers import plain
from megatron_rl.workers.child import KeptProcess
from megatron_rl.workers.frames import Channel, FrameError, pack
from megatron_rl.workers.process import READY, describe_error

if TYPE_CHECKING:  # a worker does not load pydantic
    from megatron_rl.workers.answers import Answer

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
    is_again: bool = False  # whether it has failed in a worker that may have been spoiled before

    def fail(self, result: ResultT) -> None:
        self.call.results[self.number] = result


class WorkerPool(Generic[ResultT]):
    """Distributes tasks to worker processes. A context manager; entering starts the workers without waiting for them. A subclass sets
    `section`, its section of the configuration, and `module`, which the workers run and which calls `megatron_rl.workers.process.serve`
    with `argument`. `timeout`: seconds allowed for one task, except a worker's first of a kind. `memory_mb`: address space of a worker in
    MiB."""

    section: str
    module: str
    answer_type: ClassVar[Any]
    """Type of what a handler returns, as JSON."""

    def make_result(self, answer: Any) -> ResultT:
        """Return the result that a handler has returned, typed as `answer_type`. Raise ValueError if it cannot be one."""
        raise NotImplementedError

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
        self._again: deque[_Task[ResultT]] = deque()  # tasks that wait for a new worker
        self._changed = threading.Condition()
        self._driven = False  # whether a thread is communicating with the workers, on behalf of all calling threads
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)
        self._read: Callable[[bytes], Answer[Any]] | None = None

    def __enter__(self) -> Self:
        self._start_missing()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Terminate the workers. A later call of `run` starts new ones."""
        for worker in self._workers:
            worker.begin_end()
        for worker in list(self._workers):
            self._discard(worker)

    def wait_until_ready(self) -> None:
        """Wait until all workers have loaded their handler. Raise RunError if one cannot load it."""
        while not all(worker.ready for worker in self._workers):
            self._collect()
            self._start_missing()

    def run(self, tasks: Sequence[tuple[Any, ...]]) -> list[ResultT]:
        """Return the handler's results for the tasks, in order. Each task is a tuple of arguments that `plain.dump` takes. Thread-safe.
        The result of a task without an answer is `make_failure` of the reason, such as "timeout after 5 s" or "worker died (signal 9)".
        Raise RunError if the workers cannot be started."""
        call = _Call[ResultT](len(tasks))
        with self._changed:
            self._waiting.extend(_Task(call, number, each, self.find_kind(*each)) for number, each in enumerate(tasks))
            if self._driven:
                with contextlib.suppress(BlockingIOError):  # it is woken already
                    self._wake.send(b"!")  # the driving thread may have an idle worker
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
            for task in [*self._waiting, *self._again, *(task for worker in self._workers for task in worker.tasks)]:
                task.call.failed = True
            self._waiting.clear()
            self._again.clear()
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
                if self._again and worker.is_new:
                    chunk = [self._again.popleft()]
                else:
                    size = min(LARGEST_CHUNK, -(-len(self._waiting) // (2 * self._count)))
                    chunk = [self._waiting.popleft() for _ in range(size)]
            frames = b"".join(self._pack(worker, task) for task in chunk)
            if worker.tasks:
                worker.expect_answer(self._find_limit(worker, worker.tasks[0]))
                if not worker.channel.put(frames):
                    self._replace(worker, "")  # it died while idle, so no task is at fault

    def _pack(self, worker: _Worker, task: _Task[ResultT]) -> bytes:
        """Return the frame of a task for a worker, or nothing after failing a task that cannot be sent."""
        try:
            return worker.pack(task)
        except Exception as error:  # an object of the row that cannot be written as JSON, or a row that is too large
            task.fail(self.make_failure(f"the task cannot be sent: {describe_error(error)}"))
            return b""

    def _find_limit(self, worker: _Worker, task: _Task[ResultT]) -> float:
        if task.kind in worker.known:
            return self._timeout
        # one that runs again probably hangs
        return min(self._first_timeout, self._timeout + 10 * self._slowest_first) if task.is_again else self._first_timeout

    def _collect(self) -> None:
        """Wait for the next answer or deadline, take all answers that have arrived, and replace late workers."""
        busy = [worker for worker in self._workers if worker.tasks or not worker.ready]
        if not busy:
            return
        with selectors.PollSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for worker in busy:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.must_send else 0)
                selector.register(worker.channel, events, worker)
            ready = selector.select(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 16)
        for key, events in ready:
            if key.data and events & selectors.EVENT_WRITE:
                key.data.channel.send()
            if key.data and events & selectors.EVENT_READ:
                self._receive(key.data)
        for worker in busy:
            if worker in self._workers and time.monotonic() > worker.deadline and (worker.tasks or not worker.ready):
                self._give_up(worker)

    def _give_up(self, worker: _Worker) -> None:
        """Replace a worker that is late."""
        if worker.ready and worker.tasks[0].kind not in worker.known:
            # the task probably hangs; many that hang must not take this long each
            self._first_timeout = max(self._timeout, 2 * self._slowest_first, self._first_timeout / 2)
        reason = f"{'timeout' if worker.ready else 'not ready'} after {worker.limit:g} s"
        self._replace(worker, reason, may_be_innocent=worker.has_leftovers or worker.channel.has_part)

    def _receive(self, worker: _Worker) -> None:
        """Take what has arrived from a worker."""
        if self._read is None:
            from megatron_rl.workers.answers import make_reader

            self._read = make_reader(self.answer_type)
        try:
            for answer in map(self._read, worker.channel.receive()):
                if not self._take(worker, answer):
                    return
        except ValueError as error:
            kind = "too large" if isinstance(error, FrameError) else "malformed"
            self._replace(worker, f"what came from the worker is no answer ({kind})", may_be_innocent=True)
            return
        if worker.channel.closed:
            self._replace(worker, worker.cause_of_death(), may_be_innocent=True)

    def _take(self, worker: _Worker, answer: Answer[Any]) -> bool:
        """Take an answer. Return False if the worker was replaced."""
        if not worker.ready and answer.number == READY:
            if answer.error:
                what = f"a {self.section} worker with {self._memory_mb} MiB could not load its functions"
                raise RunError(f"{what}: {answer.error}")
            worker.ready, self._failed_starts = True, 0
            return True
        if not worker.tasks or answer.number != worker.numbers[0]:
            self._replace(worker, "the worker answered out of turn", may_be_innocent=True)
            return False
        if answer.exhausted and not worker.is_new:
            self._replace(worker, "the worker ran out of something", may_be_innocent=True)
            return False
        result = self.make_failure(answer.error) if answer.error else self.make_result(answer.result)
        task = worker.take_answered()
        task.call.results[task.number] = result
        worker.has_leftovers = answer.has_leftovers
        if task.kind not in worker.known:
            worker.known.add(task.kind)
            self._slowest_first = max(self._slowest_first, time.monotonic() - worker.deadline + worker.limit)
        if answer.exhausted or answer.grown:
            self._replace(worker, "")
            return False
        if worker.tasks:
            worker.expect_answer(self._find_limit(worker, worker.tasks[0]))
        return True

    def _replace(self, worker: _Worker, reason: str, may_be_innocent: bool = False) -> None:
        """Drop a worker. If there is a `reason`, its current task fails, or runs again if an earlier task may be to blame; its other tasks
        return to the front of the queue."""
        if worker.tasks and reason:
            task = worker.tasks.popleft()
            if may_be_innocent and not worker.is_new and not task.is_again:
                with self._changed:
                    self._again.append(replace(task, is_again=True))
            else:
                task.fail(self.make_failure(reason))
        with self._changed:
            self._waiting.extendleft(task for task in reversed(worker.tasks) if not task.is_again)
            self._again.extendleft(task for task in worker.tasks if task.is_again)
        self._failed_starts += not worker.ready
        self._discard(worker)
        if self._failed_starts >= MOST_FAILED_STARTS * self._count:
            raise RunError(f"{self.section} workers do not start: {reason} ({self.section}.memory_mb = {self._memory_mb})")


class _Worker:
    """One worker process, its socket, and the tasks that it has not answered yet."""

    def __init__(self, module: str, argument: str, memory_mb: int) -> None:
        end, remote = socket.socketpair()
        self.channel = Channel(end)
        search_path = [*(path or os.getcwd() for path in sys.path), os.getcwd()]  # a user's function may be in the working directory
        with remote:
            self._process = KeptProcess(
                [sys.executable, "-P", "-m", module, str(remote.fileno()), argument, str(memory_mb)],
                [remote.fileno()],
                os.environ | {"PYTHONPATH": os.pathsep.join(search_path), "OMP_NUM_THREADS": "1"},
            )
        self.ready = False
        self.is_new = True  # whether it has answered no task
        self.has_leftovers = False  # whether tasks have left threads behind
        self.known = set[object]()  # kinds of the tasks that it has answered
        self.tasks: deque[_Task[Any]] = deque()
        self.numbers: deque[int] = deque()  # of the tasks, which its answers must repeat
        self.expect_answer(START_TIMEOUT)

    def expect_answer(self, limit: float) -> None:
        """Set the deadline of the next message to `limit` seconds from now."""
        self.limit, self.deadline = limit, time.monotonic() + limit

    def pack(self, task: _Task[Any]) -> bytes:
        """Return the frame with a task, whose answer is due from now on. Raise any exception if the task cannot be sent."""
        number = secrets.randbits(48)  # an earlier task cannot guess it, and so not answer in place of this one
        is_first = task.kind not in self.known and all(task.kind != other.kind for other in self.tasks)
        frame = pack(plain.dump((number, is_first, task.arguments)))
        self.tasks.append(task)
        self.numbers.append(number)
        return frame

    def take_answered(self) -> _Task[Any]:
        """Return the oldest task, which has been answered."""
        self.numbers.popleft()
        self.is_new = False
        return self.tasks.popleft()

    def cause_of_death(self) -> str:
        """Return why the process, whose socket has closed, ended, such as "worker died (signal 9)"."""
        code = self._process.wait(5)
        if code is None:
            return "worker closed its pipe"
        return f"worker died (signal {-code})" if code < 0 else f"worker died (exit code {code})"

    def begin_end(self) -> None:
        self._process.begin_end()

    def end(self) -> None:
        """Kill the process and everything that it has forked, and release its resources."""
        self.channel.close()
        self._process.end()
