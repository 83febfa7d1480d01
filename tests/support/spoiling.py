"""A reward function that leaves its worker in a bad state, or writes on the worker's socket, as a text asks; see `test_worker_state`."""

import os
import pickle
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress

from megatron_rl.types import Reward

_kept = []


def _fill_memory():
    with suppress(MemoryError):
        while True:
            _kept.append(bytearray(2**23))


def _start_threads():
    with suppress(RuntimeError, MemoryError):
        while True:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def _open_one():
    _kept.append(open("/dev/null", "rb"))  # noqa: SIM115


def _open_files():
    with suppress(OSError):
        while True:
            _open_one()


def _open_files_until_it_fails():
    while True:
        _open_one()


def _fill_memory_until_it_fails():
    while True:
        _kept.append(bytearray(2**23))


def _write(content):
    """Write on every socket of this process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, content)


def _frame(content):
    return struct.pack(">I", len(content)) + content


class Touch:
    """Its pickle makes a file."""

    def __reduce__(self):
        return os.mknod, (os.environ["SPOILING_FILE"],)


def _later(seconds, act):
    threading.Thread(target=lambda: (time.sleep(seconds), act()), daemon=True).start()


def _print(stream):
    for _ in range(100):
        os.write(stream, b"x" * 2**20)


def _remove_folder():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def _leave_a_daemon():
    """Leave a process without a parent, in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.wait()


def _share_memory():
    from multiprocessing.shared_memory import SharedMemory

    _kept.append(SharedMemory(os.environ["SPOILING_NAME"], create=True, size=4096))


_HALF = struct.pack(">I", 20) + b"half"
_FORGED = b'{"number": %d, "result": [[9.0, true, "", null]]}'
_MISDEEDS = {
    "fill memory": _fill_memory,
    "fill memory until it fails": _fill_memory_until_it_fails,
    "start threads": _start_threads,
    "leave a few threads": lambda: [_later(1000, list) for _ in range(5)],
    "open files": _open_files,
    "open files until it fails": _open_files_until_it_fails,
    "close descriptors": lambda: os.closerange(3, 1000),
    "close all descriptors": lambda: os.closerange(0, 65536),
    "close standard output": lambda: sys.stdout.close(),
    "close descriptor 1": lambda: os.close(1),
    "print": lambda: _print(1),
    "print errors": lambda: _print(2),
    "half a message": lambda: _write(_HALF),  # the answer completes it
    "half a message, then hang": lambda: (_write(struct.pack(">I", 1000) + b"half"), time.sleep(1000)),
    "half a message later": lambda: _later(0.1, lambda: _write(_HALF)),
    "a foreign message": lambda: _write(b"hello, is anybody there?"),
    "a foreign frame": lambda: _write(_frame(b"hello")),
    "a foreign frame later": lambda: _later(0.1, lambda: _write(_frame(b"hello"))),
    "a pickle": lambda: _write(_frame(pickle.dumps(Touch()))),
    "nested brackets": lambda: _write(_frame(b"[" * 10**6)),
    "a flood of frames": lambda: _write(_frame(b"") * 10**5),
    "an early answer": lambda: _write(b"".join(_frame(_FORGED % number) for number in range(-1, 300))),
    "an answer of nan": lambda: _write(_frame(b'{"number": 1, "result": [[NaN, true, "", null]]}')),
    "hang": lambda: time.sleep(1000),
    "exit later": lambda: _later(0.1, lambda: os._exit(7)),
    "an alarm later": lambda: signal.setitimer(signal.ITIMER_REAL, 0.1) and None,
    "fork, and return twice": lambda: os.fork() and None,
    "leave a child": lambda: _kept.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])),
    "leave a daemon": _leave_a_daemon,
    "kill the keeper": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "stop the keeper": lambda: os.kill(os.getppid(), signal.SIGSTOP),
    "share memory": _share_memory,
    "return a pickle that acts": lambda: Reward(1.0, True, answer=Touch()),
    "a long answer": lambda: Reward(1.0, True, answer="x" * 2**27),
    "half a character": lambda: Reward(1.0, True, answer="\ud800"),
    "an infinite number": lambda: 10**400,
    "change the folder": lambda: os.chdir("/"),
    "remove its folder": _remove_folder,
    "limit the recursion": lambda: sys.setrecursionlimit(60),
    "pid": lambda: Reward(float(os.getpid()), True),
}


def _descend(depth):
    return depth and _descend(depth - 1)


class Environment:
    """Does what a text asks."""

    def __init__(self, problem): ...

    def step(self, text):
        from megatron_rl.rollout.environments.base import Message

        match text:
            case "hold a pickle that acts":
                self.held = Touch()
            case "hold too much":
                self.held = "x" * 2**27
            case _ if text in _MISDEEDS:
                _MISDEEDS[text]()
        bytearray(2**24)
        return Message(text)


def reward(text, problem):
    print("noise")
    bytearray(2**24)
    _descend(80)
    with open("pyproject.toml", "rb"):  # the working directory is that of the run
        pass
    act = _MISDEEDS.get(text)
    returned = act() if act else time.sleep(0.02)
    return returned if isinstance(returned, Reward | int) else Reward(1.0, True, answer=text)
