"""Starts and stops a run: process groups, models, engines, reward workers, and the log. Stops everything in reverse order."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.config.launch import read_launch
from megatron_rl.distributed import to_run_error
from megatron_rl.errors import MegatronRLError, MismatchError, RunError
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.run_folder import read_metrics
from megatron_rl.observability.signals import check_stop, is_second, prefer_stop_error, stopping
from megatron_rl.preflight import TRAIN
from megatron_rl.reporting.report import headline, write_report
from megatron_rl.training.build import build_loop
from megatron_rl.training.context import open_run
from megatron_rl.training.loop import Loop
from megatron_rl.training.start import start_trainer
from parallel.layout import Layout
from parallel.plug import SignalExit

_COLLECTIVE_TIMEOUT_MINUTES = 24 * 60  # timeout of collectives in a run with a watchdog, which ends a stuck run much earlier


class Session:
    """One run, new or resumed."""

    def __init__(self, config: Config, layout: Layout, resources: ExitStack) -> None:
        self.layout = layout
        start_trainer(config, layout, TRAIN, resources, _COLLECTIVE_TIMEOUT_MINUTES if config.log.stuck_after else 30)
        self.context = open_run(config, layout, resources, self._report_end)
        self.folder, self.log = self.context.folder, self.context.log

    def run(self) -> Path:
        """Train, write checkpoints and the report, and return the run's folder. A run that breaks is marked and keeps its files."""
        loop, alone = None, self.layout.world_size == 1
        try:
            check_stop()
            loop, self._search = build_loop(self.context)
            with stopping(at_once=alone):
                loop.run()
        except BaseException as raised:
            with stopping(at_once=False):
                error = self._end(loop, raised)
            if error is not raised:
                raise error from raised
            raise
        with stopping(at_once=False):
            self.log.run_local(lambda log: log.write_event(headline(read_metrics(self.folder))))
            self._close_log("finished")
        return self.folder

    def _end(self, loop: Loop | None, raised: BaseException) -> BaseException:
        """Write a last checkpoint, if possible, and the end of a run that broke. Return the error to show."""
        if loop is not None and isinstance(raised, MismatchError):  # the loop raises a RunError on all ranks
            hang_watchdog.enter_phase("locating the difference")
            self._search(raised)
        on_all_ranks, alone = loop is not None and isinstance(raised, RunError), self.layout.world_size == 1
        error = prefer_stop_error(to_run_error(raised) or raised, alone=not on_all_ranks)
        if loop is not None and (on_all_ranks or alone) and not is_second():
            self._try_checkpoint(loop)
        self._close_log("broken", str(error) if isinstance(error, MegatronRLError) else f"{type(error).__name__}: {error}")
        return error

    def _try_checkpoint(self, loop: Loop) -> None:
        hang_watchdog.enter_phase("checkpoint")
        try:
            loop.save(last=True)
        except (Exception, SignalExit) as error:  # report the run's own error, not this one
            self.context.notify(f"no last checkpoint: {'a second signal came' if is_second() else error}")

    def _report_end(self, line: str) -> None:
        """Mark the run as broken. Called in a thread that then ends the process."""
        print(f"megatron-rl [rank {dist.get_rank()}]: {line}", file=sys.stderr, flush=True)
        self._close_log("broken", line)

    def _close_log(self, status: Literal["finished", "broken"], reason: str = "") -> None:
        """Finish the log and write the report. An error here never hides the run's own error."""
        try:
            self.log.run_local(lambda log: log.finish(status, reason))
        except OSError as error:
            print(f"megatron-rl: the end of the run could not be recorded: {error}", file=sys.stderr)
        try:
            self.log.run_local(lambda log: write_report(log.dir))
        except Exception as error:
            print(f"megatron-rl: no report: {error}", file=sys.stderr)


def run_session(config: Config, layout: Layout) -> Path:
    """Train as configured, stop everything, and return the run's folder. Under torchrun, every rank calls this.

    Raises:
        UserError: a mistake in the input that `preflight.check_run` could not detect.
        RunError: the run broke. Its log and a last checkpoint remain.
    """
    read_launch(joins=True)
    with ExitStack() as resources:
        return Session(config, layout, resources).run()
