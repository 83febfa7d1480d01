"""The real loop over gloo that stands still or is stopped: run in the ranks of a `World`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.errors import RunError
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.rank_log import rank_log
from megatron_rl.observability.signals import install_signal_handlers, prefer_stop_error
from parallel.layout import Layout
from support.resumed import train_to
from support.trainer import start


def train_with_watchdog(folder: Path, run: Path, precision: dict[str, Any], stuck_after: float) -> None:
    """Trains for ever; what is to be said when the run stands still is written to `run`/said."""
    start(layout := Layout(tp=2))
    run.mkdir(exist_ok=True)
    rank = dist.get_rank()
    with (
        rank_log(run, rank, 2) as log,
        hang_watchdog.watch_for_hangs(run, rank, 2, stuck_after, log, lambda line: _say(run, f"rank {rank}: {line}")),
    ):
        train_to(folder, run, 1_000_000, precision, layout=layout)


def _say(run: Path, line: str) -> None:
    (run / "said").write_text(line)


def break_after_a_signal(rank: int) -> RunError:
    """What ends a run that breaks on all ranks after that one got SIGUSR1."""
    start(Layout(tp=2))
    install_signal_handlers(alone=False)
    if dist.get_rank() == rank:
        signal.raise_signal(signal.SIGUSR1)
    return prefer_stop_error(RunError("the engine is gone"))
