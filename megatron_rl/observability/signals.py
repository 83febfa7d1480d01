"""SIGTERM, which a cluster sends before it kills, and SIGUSR1, its earlier warning: the run writes a checkpoint and ends its engines.

A run of one process unwinds at once. Ranks that wait for each other must stop at the same place: each only notes the signal, and all stop
together at the loop's next `check_stop`. A second signal ends a rank at once.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from megatron_rl.distributed import gather_from_ranks, raise_on_all_ranks
from megatron_rl.errors import RunError

_signal_name = ""
"""The first signal received; "" for none."""
_EXIT_CODE = 128 + signal.SIGTERM
"""For either signal: the run may go on from its checkpoint."""


class StopError(RunError):
    """Raised on every rank when one was asked to stop."""

    exit_code = _EXIT_CODE


def install_signal_handlers(alone: bool) -> None:
    """Handle both signals from now on; `alone`: this process may unwind at once, since no other rank waits for it."""
    global _signal_name
    _signal_name = ""

    def handle_signal(number: int, _: Any) -> None:
        global _signal_name
        if alone or _signal_name:
            sys.exit(_EXIT_CODE)
        _signal_name = signal.Signals(number).name

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle_signal)


def check_stop() -> None:
    """Raise StopError on every rank if any was asked to stop. Collective."""
    raise_on_all_ranks(_stop_error())


def prefer_stop_error(error: RunError) -> RunError:
    """Return what ends the run: StopError if any rank was asked to stop, else `error`, which all ranks have. Collective.

    A cluster signals the processes below a rank as well, so a stop may show first as a lost engine.
    """
    return error if isinstance(error, StopError) else next(filter(None, gather_from_ranks(_stop_error())), error)


def _stop_error() -> StopError | None:
    return StopError(f"stopped by {_signal_name}") if _signal_name else None
