"""What the parts of a run share, and the folder, log, and watchdogs that all of them need."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_rl.config import Config
from megatron_rl.distributed import Rank0, raise_on_all_ranks
from megatron_rl.distributed.heartbeats import watch_for_lost_ranks
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint.folder import set_aside
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.rank_log import rank_log
from megatron_rl.observability.run_log import RunLog
from megatron_rl.observability.signals import stopping
from megatron_rl.preflight.resumed_run import ResumedRun
from megatron_rl.training.resume import ResumePoint, describe_layout, find_resume_point, hash_models
from megatron_rl.versions import collect_versions
from parallel.layout import Layout


@dataclass(frozen=True)
class RunContext:
    """What the parts of a run share."""

    config: Config
    layout: Layout
    folder: Path
    log: Rank0[RunLog]
    resources: ExitStack  # stops what was started, in reverse order
    resumed: ResumedRun | None = None  # None: a new run, like `resume_point`
    resume_point: ResumePoint | None = None

    def notify(self, text: str) -> None:
        """Write one line to the console and run.log. Does nothing on ranks other than 0."""
        self.log.run_local(lambda log: log.write_event(text))


def open_run(config: Config, layout: Layout, resources: ExitStack, on_end: Callable[[str], None]) -> RunContext:
    """Create the run's folder, or reopen that of the run that `checkpoint.resume` names, whose configuration then counts. Open this rank's
    log, and watch for hangs and lost ranks: `on_end` is called with a line before these end the process. Raise UserError if a rank cannot
    see the folder. Collective."""
    resumed, point = find_resume_point(config) or (None, None)
    config = resumed.config if resumed else config
    models = resumed.models if resumed else hash_models(config)
    with stopping(at_once=False):  # `Session.run` records the end of a run whose log is open
        log = Rank0(lambda: _open_log(config, layout, resumed, point, models))
        run = RunContext(config, layout, log.run(lambda log: log.dir, Path), log, resources, resumed, point)
        _watch_run(run, on_end)
    return run


def _open_log(config: Config, layout: Layout, resumed: ResumedRun | None, point: ResumePoint | None, models: dict[str, str]) -> RunLog:
    """Create the run's folder, or reopen the folder of the resumed run. `models`: their hashes. Rank 0 only."""
    launch = config.model_dump(mode="json"), collect_versions(), models
    if resumed is None or point is None:
        return RunLog.create(config.log.dir, *launch)
    folder = point.folder.parents[1]
    step, is_recorded = point.state["step"], point.state.get("unrecorded") is None
    log = RunLog.reopen(folder, *launch, step, step if is_recorded else step - 1)
    for line in point.describe(describe_layout(layout, config.train)):
        log.write_event(line)
    log.record_changes(resumed.describe_changes())
    for damaged in point.damaged:
        set_aside(damaged)
    shutil.rmtree(folder / "engine_model", ignore_errors=True)
    hang_watchdog.clear_rank_files(folder)
    return log


def _watch_run(run: RunContext, on_end: Callable[[str], None]) -> None:
    rank, size, settings = dist.get_rank(), run.layout.world_size, run.config.log
    rule = f"rank {rank} cannot see the run's folder"
    invisible = UserError("log.dir", str(settings.dir), rule, "name a folder that all nodes share")
    raise_on_all_ranks(None if run.folder.is_dir() else invisible)
    log = run.resources.enter_context(rank_log(run.folder, rank, size))
    run.resources.enter_context(hang_watchdog.watch_for_hangs(run.folder, rank, size, settings.stuck_after, log, on_end))
    run.resources.enter_context(watch_for_lost_ranks(settings.lost_after, on_end))
