"""SIGTERM, which a cluster sends some seconds before it kills: the run unwinds, ends its engine and leaves a checkpoint where it can.

A run of one process unwinds at once. Ranks that wait for each other must stop at the same place, so each only notes the signal, and all
stop together where the loop asks; a second signal ends a rank at once.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from megatron_rl.errors import RunError
from megatron_rl.ranks import raise_together

_asked = False
_CODE = 128 + signal.SIGTERM


class StopError(RunError):
    """Raised on every rank when one was asked to stop."""

    exit_code = _CODE


def listen(alone: bool) -> None:
    """From now on SIGTERM is heard; `alone` where this process may unwind at once, waiting for no other rank."""
    global _asked
    _asked = False

    def hear(*_: Any) -> None:
        global _asked
        if alone or _asked:
            sys.exit(_CODE)
        _asked = True

    signal.signal(signal.SIGTERM, hear)


def check_stop() -> None:
    """Raises StopError on every rank where any was asked to stop; collective."""
    raise_together(StopError("stopped by SIGTERM") if _asked else None)
