"""SIGTERM, which a cluster sends some seconds before it kills, and SIGUSR1, its earlier warning: the run unwinds, ends its engine and
leaves a checkpoint where it can.

A run of one process unwinds at once. Ranks that wait for each other must stop at the same place, so each only notes the signal, and all
stop together where the loop asks; a second signal ends a rank at once.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from megatron_rl.distributed import gather_from_ranks, raise_on_all_ranks
from megatron_rl.errors import RunError

_signal_name = ""
"""Name of the signal."""
_EXIT_CODE = 128 + signal.SIGTERM
"""For either signal: the run may go on from its checkpoint."""


class StopError(RunError):
    """Raised on every rank when one was asked to stop."""

    exit_code = _EXIT_CODE


def install_signal_handlers(alone: bool) -> None:
    """From now on both signals are heard; `alone` where this process may unwind at once, waiting for no other rank."""
    global _signal_name
    _signal_name = ""

    def hear(number: int, _: Any) -> None:
        global _signal_name
        if alone or _signal_name:
            sys.exit(_EXIT_CODE)
        _signal_name = signal.Signals(number).name

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, hear)


def stop_requested() -> bool:
    """Whether this rank was asked to stop: what breaks from now on is not worth mending."""
    return bool(_signal_name)


def check_stop() -> None:
    """Raises StopError on every rank where any was asked to stop; collective."""
    raise_on_all_ranks(_stop_error())


def prefer_stop_error(error: RunError) -> RunError:
    """What ends the run: `error`, which all ranks have, or StopError where any was asked to stop. Collective.

    A cluster signals everything below a rank as well, so that a stop may be heard first as an engine that is gone.
    """
    return error if isinstance(error, StopError) else next(filter(None, gather_from_ranks(_stop_error())), error)


def _stop_error() -> StopError | None:
    return StopError(f"stopped by {_signal_name}") if _signal_name else None
