"""Starts and stops a run: process groups, models, engines, reward workers, and the log. Stops everything in reverse order."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_rl.algorithm.old_logprobs import OldLogprobs
from megatron_rl.config import Config
from megatron_rl.config.launch import read_launch
from megatron_rl.data import ProblemStream, load_problems
from megatron_rl.data.orders import compute_fingerprint
from megatron_rl.diagnosis.checks import Diagnosis
from megatron_rl.distributed import Rank0, errors_on_all_ranks, get_rank, raise_on_all_ranks, run_on_rank0, to_run_error
from megatron_rl.distributed.heartbeats import watch_for_lost_ranks
from megatron_rl.errors import MegatronRLError, MismatchError, RunError, UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.hf.files import read_config
from megatron_rl.hf.hub import fetch_weights
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.vocabulary import check_vocabulary
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.actor import Actor, Critic
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.folder import set_aside
from megatron_rl.mcore.model import start_megatron, stop_megatron
from megatron_rl.mcore.weights.load_weights import collect_named_tensors
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.profiling import StepProfiler
from megatron_rl.observability.rank_log import rank_log
from megatron_rl.observability.run_folder import read_metrics
from megatron_rl.observability.run_log import RunLog
from megatron_rl.observability.signals import check_stop, is_second, prefer_stop_error, stopping
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.threads import count_threads
from megatron_rl.preflight import TRAIN, Needs, check_on_rank_0
from megatron_rl.preflight.resumed_run import ResumedRun, describe_change
from megatron_rl.reporting.report import headline, write_report
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.columns import choose_place
from megatron_rl.rollout.engine_pool import EnginePool, start_engines
from megatron_rl.rollout.generation import make_sampler, start_environments
from megatron_rl.rollout.worker import AsyncRolloutWorker, RolloutWorker
from megatron_rl.sync.checks import check_live_engine
from megatron_rl.sync.loaded_values import LoadedValues
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import RecoveringWeightSync, WeightSync
from megatron_rl.training.checkpoint_manager import CheckpointManager, TrainState
from megatron_rl.training.critic_trainer import CriticTrainer
from megatron_rl.training.loop import Loop
from megatron_rl.training.policies import describe_unread, load_actor, load_critic, load_reference, load_teacher
from megatron_rl.training.policy_trainer import PolicyTrainer
from megatron_rl.training.recorder import Recorder
from megatron_rl.training.resume import ResumePoint, describe_layout, find_resume_point, hash_code, hash_models
from megatron_rl.types import Problem
from megatron_rl.versions import collect_versions
from parallel.layout import Layout
from parallel.plug import SignalExit

_COLLECTIVE_TIMEOUT_MINUTES = 24 * 60  # timeout of collectives in a run with a watchdog, which ends a stuck run much earlier


def start_trainer(config: Config, layout: Layout, known: Needs, resources: ExitStack, timeout_minutes: int = 30) -> None:
    """Start Megatron, make the checks `known` that only rank 0 makes, and fetch the weights. `resources` stops Megatron, also on SIGTERM.
    `timeout_minutes`: of collectives. Collective."""
    start_megatron(layout, config.train.seed, timeout_minutes)
    resources.callback(stop_megatron)
    if not torch.cuda.is_available():
        torch.set_num_threads(count_threads(layout.world_size))
    run_on_rank0(lambda: check_on_rank_0(config, known))
    with errors_on_all_ranks():  # rank 0 has fetched the weights; nodes with separate caches fetch them too
        fetch_weights(config.model.path)


def start_empty_engines(
    config: Config, hf_config: Mapping[str, Any], folder: Path, logs: Path, notify: Callable[[str], None] = print, version: int = 0
) -> EnginePool:
    """Start the engines without weights. `folder`: an empty folder for their config.json and tokenizer; `version`: see `start_engines`.
    Rank 0 only."""
    weights = describe_weights(hf_config, PrecisionContract.from_config(config.precision))
    write_all_but_weights(folder, weights, config.model.folder)
    return start_engines(config, folder, logs, notify, empty=True, version=version)


class Session:
    """One run, new or resumed."""

    def __init__(self, config: Config, layout: Layout, resources: ExitStack) -> None:
        self.config, self.layout, self._resources = config, layout, resources
        self.contract = PrecisionContract.from_config(config.precision)
        start_trainer(config, layout, TRAIN, resources, _COLLECTIVE_TIMEOUT_MINUTES if config.log.stuck_after else 30)
        self.resumed: ResumedRun | None = None
        self.resume_point: ResumePoint | None = None
        if found := find_resume_point(config):
            self.resumed, self.resume_point = found
            self.config = self.resumed.config
        models = self.resumed.models if self.resumed else hash_models(config)
        with stopping(at_once=False):  # `run` records the end of a run whose log is open
            self.log = Rank0(lambda: self._open_log(models))
            self.folder = self.log.run(lambda log: log.dir, Path)
            self._start_watchdog()

    def _open_log(self, models: dict[str, str]) -> RunLog:
        """Create the run's folder, or reopen the folder of the resumed run. `models`: their hashes. Rank 0 only."""
        launch = self.config.model_dump(mode="json"), collect_versions(), models
        if self.resumed is None or self.resume_point is None:
            return RunLog.create(self.config.log.dir, *launch)
        folder = self.resume_point.folder.parents[1]
        step, is_recorded = self.resume_point.state["step"], self.resume_point.state.get("unrecorded") is None
        log = RunLog.reopen(folder, *launch, step, step if is_recorded else step - 1)
        for line in self.resume_point.describe(describe_layout(self.layout, self.config.train)):
            log.write_event(line)
        log.record_changes(self.resumed.describe_changes())
        for damaged in self.resume_point.damaged:
            set_aside(damaged)
        shutil.rmtree(folder / "engine_model", ignore_errors=True)
        hang_watchdog.clear_rank_files(folder)
        return log

    def _start_watchdog(self) -> None:
        """Open this rank's log and start the watchdog. Raises UserError if a rank cannot see the run's folder."""
        rank, size, settings = dist.get_rank(), self.layout.world_size, self.config.log
        rule = f"rank {rank} cannot see the run's folder"
        invisible = UserError("log.dir", str(settings.dir), rule, "name a folder that all nodes share")
        raise_on_all_ranks(None if self.folder.is_dir() else invisible)
        log = self._resources.enter_context(rank_log(self.folder, rank, size))
        self._resources.enter_context(hang_watchdog.watch_for_hangs(self.folder, rank, size, settings.stuck_after, log, self._report_end))
        self._resources.enter_context(watch_for_lost_ranks(settings.lost_after, self._report_end))

    def _build_loop(self) -> Loop:
        """Load the models, start the engines without weights, and compare the precision graphs. The first sync fills the engines."""
        config, layout, contract = self.config, self.layout, self.contract
        hang_watchdog.enter_phase("loading the model")
        hf_config = read_config(config.model.folder)
        stored = find_checkpoint_format(hf_config)
        if stored is not None and stored.name != contract.trainer_format.name:
            self.notify(f"the checkpoint is {stored.name.upper()}, the trainer is not: it starts from the dequantized weights")
        for line in describe_unread(config, hf_config) if get_rank() == 0 else ():
            self.notify(line)
        actor, shards = load_actor(config, layout, hf_config)
        critic = load_critic(config, layout, hf_config)
        state = self._load_checkpoint(actor, critic)
        read_named_tensors = partial(collect_named_tensors, actor.model, shards, contract)
        hang_watchdog.enter_phase("loading the frozen models")
        reference, teacher = load_reference(config, layout, hf_config, actor), load_teacher(config, layout)
        if config.placement.kind == "colocated":
            actor.offload_optimizer()  # as in every sync, so that engines find the same free memory
            if critic is not None:
                critic.offload_optimizer()

        rollout = Rank0(lambda: self._start_rollout(hf_config, state))
        engines, worker = Rank0(lambda: rollout.value[0]), Rank0(lambda: rollout.value[1])
        hang_watchdog.enter_phase("checking the engines")
        geometry, rollout_layout = config.make_geometry(hf_config), config.rollout.to_layout()
        plan = SyncPlan.make(geometry, layout, rollout_layout, contract, config.sync.chunk_bytes, get_rank())
        diagnosis = Diagnosis(config, actor, hf_config, read_named_tensors, self.notify)
        check_loaded = None  # a resumed run holds what it has trained
        if state is None:
            check_loaded = LoadedValues(plan, get_rank(), config.model.folder, hf_config, self.notify).check
        sync = WeightSync(plan, engines, read_named_tensors, config.sync, diagnosis.canary, self.notify, check_loaded)
        self._resources.callback(sync.close)
        engines.run(lambda engines: check_live_engine(plan, engines))
        diagnosis.check_graphs(engines, self.folder, critic)
        self.notify(f"engines up: {config.rollout.engines}; they serve after the first proved sync")

        critic_trainer = None if critic is None else CriticTrainer(config, critic)
        checks = diagnosis.bound, diagnosis.draws, OldLogprobs(config, diagnosis.exact)
        trainer = PolicyTrainer(config, actor, reference, diagnosis.attribution, engines, *checks, critic_trainer, teacher)
        search = diagnosis.make_search(engines, plan, self.folder)
        self._search = lambda error: search(error, trainer.compared)
        recovering_sync = RecoveringWeightSync(sync, engines, self.notify)
        profiler = StepProfiler(self.folder, get_rank(), config.log.profile_steps, config.log.profile_ranks)
        recorder = Recorder(self.log, engines, profiler)
        saved = -1 if state is None else state.version
        checkpoints = CheckpointManager(config, layout, self.folder, actor, hf_config, self.notify, saved, critic)
        return Loop(config, worker, trainer, recovering_sync, recorder, checkpoints, state)

    def _load_checkpoint(self, actor: Actor, critic: Critic | None) -> TrainState | None:
        """Load the checkpoint of a resumed run and return its state, or None for a new run."""
        if self.resume_point is None:
            return None
        try:
            state = TrainState.from_dict(self.resume_point.state)
        except (KeyError, TypeError, ValueError) as error:
            rule, fix = f"its state.json lacks {error}", "start a new run with checkpoint.resume=never"
            raise UserError("checkpoint.resume", str(self.resume_point.folder), rule, fix) from None
        same_layout = self.resume_point.matches_layout(describe_layout(self.layout, self.config.train))
        of_critic = None if critic is None else (critic.model, critic.optimizer)
        load_run_checkpoint(self.resume_point.folder, actor.model, actor.optimizer, self.resume_point.state, same_layout, of_critic)
        actor.steps_done = state.optimizer_steps
        if critic is not None:
            critic.steps_done = state.critic_steps
        if self.config.replay is not None and get_rank() == 0:
            from megatron_rl.batch.replay import read_groups

            state = replace(state, replay=read_groups(self.resume_point.folder))
        return state

    def _start_rollout(self, hf_config: dict[str, Any], state: TrainState | None) -> tuple[EnginePool, AsyncRolloutWorker]:
        """Load the problems and start reward workers and engines. Rank 0 only."""
        config = self.config
        tokenizer = load_tokenizer(config.model.folder)
        try:
            stream, held_out = load_problems(config, tokenizer)
        except UserError as error:  # the check before the run has read the same data
            raise RunError(f"the data can no longer be read: {error}") from None
        if state is not None:
            stream.load_state_dict(state.data(), bool(self.resumed and self.resumed.may_have_other_problems))
        self._record_contents(stream, held_out)
        scorer = self._resources.enter_context(Scorer(config.reward, self.notify, tokenizer.chat_template))
        environments = start_environments(config, self._resources)
        self.notify(f"starting the engines: {config.rollout.engines}")
        hang_watchdog.enter_phase("starting the engines", limit=config.rollout.start_timeout)
        (model := self.folder / "engine_model").mkdir()
        engines = start_empty_engines(config, hf_config, model, self.folder, self.notify, 0 if state is None else state.version)
        self.log.value.record_launch(engine_seeds=engines.seeds)
        self._resources.callback(engines.stop)
        check_vocabulary(engines.read_vocabulary(), tokenizer, config.model.folder, hf_config)
        sampler = make_sampler(config, engines, tokenizer, environments, self._resources)
        place = choose_place(config)
        worker = RolloutWorker(config, sampler, stream, held_out, scorer, self.notify, place, engines)
        ahead = AsyncRolloutWorker(worker, config.placement.max_staleness, config.train.steps, engines.stop)
        self._resources.callback(ahead.close)
        return engines, ahead

    def _record_contents(self, stream: ProblemStream, held_out: Sequence[Problem]) -> None:
        """Write the fingerprints of what the configuration names to run.json, and what differs in a resumed run. Rank 0 only."""
        scored = compute_fingerprint(*(problem.to_json() for problem in held_out))
        problems = {"data.train.source": f"problems {stream.fingerprint}", "data.eval.source": f"problems {scored}"}
        code = {field: f"code {value}" for field, value in hash_code(self.config).items()}
        log = self.log.value
        if others := log.record_contents(problems | code):
            log.record_changes([describe_change(field, *values) for field, values in others.items()])

    def run(self) -> Path:
        """Train, write checkpoints and the report, and return the run's folder. A run that breaks is marked and keeps its files."""
        loop, alone = None, self.layout.world_size == 1
        try:
            check_stop()
            loop = self._build_loop()
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

    def notify(self, text: str) -> None:
        """Write one line to the console and run.log. Does nothing on ranks other than 0."""
        self.log.run_local(lambda log: log.write_event(text))

    def _try_checkpoint(self, loop: Loop) -> None:
        hang_watchdog.enter_phase("checkpoint")
        try:
            loop.save(last=True)
        except (Exception, SignalExit) as error:  # report the run's own error, not this one
            self.notify(f"no last checkpoint: {'a second signal came' if is_second() else error}")

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
