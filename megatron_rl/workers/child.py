"""Child processes of this process that run other people's code. They end with the process, not with the thread that started them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from megatron_rl.workers import keeper

LONGEST_STOP = keeper.LONGEST_END + 5.0
"""Seconds after which a keeper that was told to end is killed."""


class KeptProcess:
    """A program below a keeper (`megatron_rl.workers.keeper`), with nothing at its standard input and output, and at most 64 KiB of its
    standard error passed on. Whatever it forks ends with it."""

    def __init__(self, words: Sequence[str], files: Sequence[int], environment: Mapping[str, str]) -> None:
        """`files`: descriptors that it inherits."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), ",".join(map(str, files)), *words],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def wait(self, seconds: float) -> int | None:
        """Return the exit code, or minus the signal, of the program, or None if it has not ended after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def begin_end(self) -> None:
        """Have everything killed, without waiting for it."""
        self._process.terminate()

    def end(self) -> None:
        """Kill the program and everything that it has forked."""
        self.begin_end()
        if self.wait(LONGEST_STOP) is None:  # the program has stopped its keeper
            self._process.kill()
            self._process.wait()
