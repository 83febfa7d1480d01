"""Processes of tests: worlds of gloo ranks that run functions on request, and commands that end with all their children."""

import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import socket
import subprocess
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil

import megatron_rl.mcore  # noqa: F401 # before a test imports Megatron
from megatron_rl.errors import MegatronRLError
from support.tensor_bytes import dumps

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    """Exit code and output of a command that has ended."""

    code: int
    out: str
    err: str


def one_thread_environment():
    """Return the environment of a process that shares two cores with others and finds these modules. It lacks the rank variables of a
    torchrun around pytest."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "tests"))))
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "400"}


class Command:
    """A running command `python -m ARGUMENTS`. Leaving the `with` block ends it with all processes below it. `options` of
    `subprocess.Popen` override those of a plain start."""

    def __init__(self, folder, *arguments, **options):
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / "stdout", folder / "stderr"]
        with open(self._files[0], "wb") as out, open(self._files[1], "wb") as err:
            plain = {"args": [sys.executable, "-m", *map(str, arguments)], "cwd": ROOT, "env": one_thread_environment()}
            self._process = subprocess.Popen(**{**plain, "stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **options})
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end(family(self.pid))
        self._process.wait(timeout=10)

    def wait(self, seconds):
        """Wait for the end. Raise AssertionError with the output if the command does not end in time."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {seconds} s\n{self._texts()}") from None
        return Done(code, *self._texts())

    def ended(self):
        return self._process.poll() is not None

    def _texts(self):
        out, err = (file.read_text(errors="replace") for file in self._files)
        return out, err


def run_tool(name, *options, seconds=900):
    """Run `tools/NAME.py` as a user does. Return its exit code and output."""
    command = [sys.executable, ROOT / "tools" / f"{name}.py", *map(str, options)]
    return subprocess.run(command, cwd=ROOT, env=one_thread_environment(), capture_output=True, text=True, timeout=seconds, check=False)


def family(pid):
    """Return a process and all processes below it, or nothing if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def command_lines(processes):
    """Return the command line of each process. Processes that have ended, including zombies, are left out."""
    lines = {}
    for process in processes:
        with suppress(psutil.Error):
            lines[process] = process.cmdline()
    return lines


def end(processes):
    """Kill processes, which may have ended already. Resource trackers are left out, see `but_trackers`."""
    for process in but_trackers(processes):
        with suppress(psutil.Error):
            process.kill()


def but_trackers(processes):
    """Return the processes without Python's resource trackers, which clean up /dev/shm and then end with the other processes."""
    lines = command_lines(processes)
    return [process for process, words in lines.items() if not any("multiprocessing.resource_tracker" in word for word in words)]


def alive_after(processes, seconds):
    """Return the processes that still run after at most `seconds`. A zombie does not count as running."""
    deadline = time.monotonic() + seconds
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def _runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition, seconds, what, seconds_between=0.1):
    """Wait for a condition. Raise AssertionError with `what` if it does not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(seconds_between)


def call_in_fresh_process(function, *arguments, **environment):
    """Return `function(*arguments)`, called in a new interpreter with these environment variables. Propagates its errors."""
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_call, function, *arguments).result()  # `_call` makes the new interpreter import this module first


def _call(function, *arguments):
    return function(*arguments)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_NO_ANSWER = "no answer: still busy, or its process ended"
_GRACE = 60.0
"""Seconds that ranks have to answer once another rank has failed: they may wait for it for ever."""


class World:
    """`size` ranks, as torchrun would start them; a world of one rank has no torchrun environment. Close it, or use `with`.

    Ranks are forked from a server that has imported torch, Megatron and the support modules once, so a rank starts in milliseconds and
    shares their memory.
    """

    def __init__(self, size, folder):
        folder.mkdir(parents=True, exist_ok=True)
        _start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._logs = [folder / f"rank{rank}.log" for rank in range(size)]
        port = free_port()
        self._pipes = []
        self._ranks = []
        for rank, log in enumerate(self._logs):
            pipe, rank_pipe = context.Pipe()
            process = context.Process(target=_serve, args=(rank_pipe, log, _rank_environment(rank, size, port)))
            process.start()
            rank_pipe.close()
            self._pipes.append(pipe)
            self._ranks.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def pid(self, rank=0):
        return self._ranks[rank].pid or 0

    def family(self):
        """Return all ranks and all processes below them."""
        return [process for rank in range(len(self._ranks)) for process in family(self.pid(rank))]

    def is_alive(self):
        return all(process.is_alive() for process in self._ranks)

    def call(self, function, *args, seconds=900):
        """Run a function of a module on every rank; return the ranks' results.

        A MegatronRLError that every rank raised is raised here. Any other failure, including a wait of more than `seconds`, is an
        AssertionError that shows what the ranks raised and printed. It closes the world if ranks may still wait for each other.
        """
        self.send(function, *args)
        return self.receive(seconds)

    def send(self, function, *args):
        """Start a `call` without waiting, for worlds that work at the same time."""
        for pipe in self._pipes:
            with suppress(ConnectionError):  # a rank that ended: `receive` reports it
                pipe.send_bytes(dumps((function, args)))

    def receive(self, seconds):
        """Wait for the results of `send`."""
        answers = self._collect_answers(seconds)
        errors = [error for _, error in answers]
        if all(isinstance(error, MegatronRLError) for error in errors):
            raise errors[0]
        failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None]
        if failed:
            if _NO_ANSWER in errors or len(failed) < len(answers):
                self.close()
            printed = [f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in self._logs]
            raise AssertionError("\n".join([f"within {seconds} s:", *failed, *printed]))
        return [result for result, _ in answers]

    def close(self):
        """End the ranks and all processes below them."""
        processes = self.family()
        end(processes)
        alive_after(processes, 30)
        for pipe in self._pipes:
            pipe.close()

    def _collect_answers(self, seconds):
        """Return every rank's (result, error). Wait at most `seconds`, or `_GRACE` after the first error."""
        answers = [(None, _NO_ANSWER)] * len(self._pipes)
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if not pipe.closed}
        deadline = time.monotonic() + seconds
        while waiting and (ready := multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                with suppress(EOFError, ConnectionError):
                    answers[rank] = pipe.recv()
                if answers[rank][1] is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers


class WorldPool:
    """A pool with one world of each size, created on first use and again after a failure has closed it."""

    def __init__(self, folder):
        self._folder = folder
        self._worlds = {}

    def __call__(self, size):
        if size not in self._worlds or not self._worlds[size].is_alive():
            self._worlds[size] = World(size, self._folder / f"world{size}")
        return self._worlds[size]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for world in self._worlds.values():
            world.close()


_PRELOADED = ["pytest", "support.training_runs", "support.transformers_reference"]


def _start_fork_server():
    """Start the fork server. It reads its environment once, so its path must hold what it imports, and it may start one thread."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with mock.patch.dict(os.environ, one_thread_environment() | {"PYTHONPATH": path}):
        multiprocessing.forkserver.ensure_running()


def _rank_environment(rank, size, port):
    if size == 1:
        return one_thread_environment()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return one_thread_environment() | {name: str(value) for name, value in place.items()}


def _serve(pipe, log, environment):
    """Run a rank: call the requested functions and answer (result, error) until the pipe closes."""
    gc.freeze()  # what the server has imported lives as long as the rank: no collection looks through half a million objects
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (function(*args), None)
        except MegatronRLError as error:
            answer = (None, error)
        except BaseException:
            answer = (None, traceback.format_exc())
        pipe.send_bytes(dumps(answer))
        del args, answer
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps of the models of a dozen waiting ranks adds up to gigabytes
