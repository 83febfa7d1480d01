"""Handles SIGTERM, which clusters send before they kill a job, and SIGUSR1, their earlier warning: the run writes a checkpoint and stops.

A run of one process unwinds immediately. Ranks that wait for each other must stop at the same place, so each rank only records the signal,
and all stop together at the loop's next `check_stop`. A second signal stops a rank immediately.
"""

import signal
from typing import Any

from megatron_rl.distributed import gather_errors, raise_on_all_ranks
from megatron_rl.errors import RunError
from parallel.user_code import SignalExit

_signal_name = ""  # name of the first signal received, or "" if there was none
_EXIT_CODE = 128 + signal.SIGTERM  # exit code for both signals. The run can be resumed from its checkpoint.


class StopError(RunError):
    """Raised on all ranks when any rank receives a stop signal."""

    exit_code = _EXIT_CODE


def install_signal_handlers(alone: bool) -> None:
    """Install the handlers. `alone` says that no other rank waits for this process, so it may unwind immediately."""
    global _signal_name
    _signal_name = ""

    def handle_signal(number: int, _: Any) -> None:
        global _signal_name
        if alone or _signal_name:
            raise SignalExit(_EXIT_CODE)
        _signal_name = signal.Signals(number).name

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle_signal)


def check_stop() -> None:
    """Raise StopError on all ranks if any rank has received a stop signal. Collective."""
    raise_on_all_ranks(_stop_error())


def prefer_stop_error(error: RunError) -> RunError:
    """Return StopError if any rank has received a stop signal, else `error`, which all ranks have. Collective. A cluster also signals the
    child processes of a rank, so a stop may first appear as a lost engine."""
    if isinstance(error, StopError):
        return error
    return next((each for each in gather_errors(_stop_error()) if isinstance(each, StopError)), error)


def _stop_error() -> StopError | None:
    return StopError(f"stopped by {_signal_name}") if _signal_name else None
