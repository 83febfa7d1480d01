"""The log of one rank, RUN_DIR/ranks/rank_00000.log: warnings and errors of all libraries, the final error, and the stacks of the rank's
threads if it crashed or the run hung. run.log has what concerns all ranks."""

import faulthandler
import logging
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from megatron_rl.errors import MegatronRLError
from megatron_rl.redaction import redact


@contextmanager
def rank_log(run: Path, rank: int, size: int) -> Iterator[IO[str]]:
    """Context manager that opens the log for appending and also sends this process's warnings to it. An exception that leaves the block is
    logged, with its traceback if it is a bug. A fatal signal logs the stacks of all threads."""
    folder = run / "ranks"
    folder.mkdir(exist_ok=True)
    with _open_log(folder / f"rank_{rank:05d}.log") as file:
        file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} rank {rank} of {size}: process {os.getpid()} on {socket.gethostname()}\n")
        handlers = _add_handlers(file)
        faulthandler.enable(file)
        try:
            yield file
        except BaseException as error:
            expected = isinstance(error, MegatronRLError | SystemExit | KeyboardInterrupt)
            text = f"ended: {type(error).__name__}: {error}\n" if expected else traceback.format_exc()
            with suppress(OSError):  # the shared folder may be gone
                file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {redact(text)}")
            raise
        finally:
            faulthandler.disable()
            logging.captureWarnings(False)
            for handler in handlers:
                logging.getLogger().removeHandler(handler)


@contextmanager
def _open_log(path: Path) -> Iterator[IO[str]]:
    """Context manager that opens a log for appending. An error of closing it does not replace the error of the block."""
    file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


class _RedactingFormatter(logging.Formatter):
    """Masks secrets in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def _add_handlers(file: IO[str]) -> list[logging.Handler]:
    """Log warnings to the file in addition to their previous destination, which is stderr if no handler was installed."""
    root, file_handler = logging.getLogger(), logging.StreamHandler(file)
    file_handler.setFormatter(_RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    file_handler.setLevel(logging.WARNING)
    handlers: list[logging.Handler] = [file_handler]
    if not root.handlers and logging.lastResort is not None:
        handlers.append(logging.lastResort)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    return handlers
