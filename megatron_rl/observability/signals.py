"""SIGTERM, which a cluster sends some seconds before it kills, and SIGUSR1, its earlier warning: the run unwinds, ends its engine and
leaves a checkpoint where it can.

A run of one process unwinds at once. Ranks that wait for each other must stop at the same place, so each only notes the signal, and all
stop together where the loop asks; a second signal ends a rank at once.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from megatron_rl.distributed import gathered, raise_together
from megatron_rl.errors import RunError

_asked = ""
"""Name of the signal."""
_CODE = 128 + signal.SIGTERM
"""For either signal: the run may go on from its checkpoint."""


class StopError(RunError):
    """Raised on every rank when one was asked to stop."""

    exit_code = _CODE


def listen(alone: bool) -> None:
    """From now on both signals are heard; `alone` where this process may unwind at once, waiting for no other rank."""
    global _asked
    _asked = ""

    def hear(number: int, _: Any) -> None:
        global _asked
        if alone or _asked:
            sys.exit(_CODE)
        _asked = signal.Signals(number).name

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hear)


def asked() -> bool:
    """Whether this rank was asked to stop: what breaks from now on is not worth mending."""
    return bool(_asked)


def check_stop() -> None:
    """Raises StopError on every rank where any was asked to stop; collective."""
    raise_together(_stop())


def stop_or(error: RunError) -> RunError:
    """What ends the run: `error`, which all ranks have, or StopError where any was asked to stop. Collective.

    A cluster signals everything below a rank as well, so that a stop may be heard first as an engine that is gone.
    """
    return error if isinstance(error, StopError) else next(filter(None, gathered(_stop())), error)


def _stop() -> StopError | None:
    return StopError(f"stopped by {_asked}") if _asked else None
