"""Builds the loop of a run: models, engines, the sync with its proof, and the checks of every step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron_rl.algorithm.old_logprobs import OldLogprobs
from megatron_rl.diagnosis.checks import Diagnosis
from megatron_rl.distributed import Rank0, get_rank
from megatron_rl.errors import MismatchError, UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Actor, Critic
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.weights.load_weights import collect_named_tensors
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.profiling import StepProfiler
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.checks import check_live_engine
from megatron_rl.sync.loaded_values import LoadedValues
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import RecoveringWeightSync, WeightSync
from megatron_rl.training.checkpoint_manager import CheckpointManager, TrainState
from megatron_rl.training.context import RunContext
from megatron_rl.training.critic_trainer import CriticTrainer
from megatron_rl.training.loop import Loop
from megatron_rl.training.policies import describe_unread, load_actor, load_critic, load_reference, load_teacher
from megatron_rl.training.policy_trainer import PolicyTrainer
from megatron_rl.training.recorder import Recorder
from megatron_rl.training.resume import describe_layout
from megatron_rl.training.start import start_rollout


def build_loop(run: RunContext) -> tuple[Loop, Callable[[MismatchError], None]]:
    """Load the models, start the engines without weights, and compare the precision graphs. The first sync fills the engines. Return the
    loop, and what searches for the cause of a mismatch that ends it."""
    config, layout, contract = run.config, run.layout, PrecisionContract.from_config(run.config.precision)
    hang_watchdog.enter_phase("loading the model")
    hf_config = read_config(config.model.folder)
    stored = find_checkpoint_format(hf_config)
    if stored is not None and stored.name != contract.trainer_format.name:
        run.notify(f"the checkpoint is {stored.name.upper()}, the trainer is not: it starts from the dequantized weights")
    for line in describe_unread(config, hf_config) if get_rank() == 0 else ():
        run.notify(line)
    actor, shards = load_actor(config, layout, hf_config)
    critic = load_critic(config, layout, hf_config)
    state = _load_checkpoint(run, actor, critic)
    read_named_tensors = partial(collect_named_tensors, actor.model, shards, contract)
    hang_watchdog.enter_phase("loading the frozen models")
    reference, teacher = load_reference(config, layout, hf_config, actor), load_teacher(config, layout)
    if config.placement.kind == "colocated":
        actor.offload_optimizer()  # as in every sync, so that engines find the same free memory
        if critic is not None:
            critic.offload_optimizer()

    rollout = Rank0(lambda: start_rollout(run, hf_config, state))
    engines, worker = Rank0(lambda: rollout.value[0]), Rank0(lambda: rollout.value[1])
    hang_watchdog.enter_phase("checking the engines")
    geometry, rollout_layout = config.make_geometry(hf_config), config.rollout.to_layout()
    plan = SyncPlan.make(geometry, layout, rollout_layout, contract, config.sync.chunk_bytes, get_rank())
    diagnosis = Diagnosis(config, actor, hf_config, read_named_tensors, run.notify)
    check_loaded = None  # a resumed run holds what it has trained
    if state is None:
        check_loaded = LoadedValues(plan, get_rank(), config.model.folder, hf_config, run.notify).check
    sync = WeightSync(plan, engines, read_named_tensors, config.sync, diagnosis.canary, run.notify, check_loaded)
    run.resources.callback(sync.close)
    engines.run(lambda engines: check_live_engine(plan, engines))
    diagnosis.check_graphs(engines, run.folder, critic)
    run.notify(f"engines up: {config.rollout.engines}; they serve after the first proved sync")

    critic_trainer = None if critic is None else CriticTrainer(config, critic)
    checks = diagnosis.bound, diagnosis.draws, OldLogprobs(config, diagnosis.exact)
    trainer = PolicyTrainer(config, actor, reference, diagnosis.attribution, engines, *checks, critic_trainer, teacher)
    search = diagnosis.make_search(engines, plan, run.folder)
    recovering_sync = RecoveringWeightSync(sync, engines, run.notify)
    profiler = StepProfiler(run.folder, get_rank(), config.log.profile_steps, config.log.profile_ranks)
    recorder = Recorder(run.log, engines, profiler)
    saved = -1 if state is None else state.version
    checkpoints = CheckpointManager(config, layout, run.folder, actor, hf_config, run.notify, saved, critic)
    loop = Loop(config, worker, trainer, recovering_sync, recorder, checkpoints, state)
    return loop, lambda error: search(error, trainer.compared)


def _load_checkpoint(run: RunContext, actor: Actor, critic: Critic | None) -> TrainState | None:
    """Load the checkpoint of a resumed run and return its state, or None for a new run."""
    if run.resume_point is None:
        return None
    try:
        state = TrainState.from_dict(run.resume_point.state)
    except (KeyError, TypeError, ValueError) as error:
        rule, fix = f"its state.json lacks {error}", "start a new run with checkpoint.resume=never"
        raise UserError("checkpoint.resume", str(run.resume_point.folder), rule, fix) from None
    same_layout = run.resume_point.matches_layout(describe_layout(run.layout, run.config.train))
    of_critic = None if critic is None else (critic.model, critic.optimizer)
    load_run_checkpoint(run.resume_point.folder, actor.model, actor.optimizer, run.resume_point.state, same_layout, of_critic)
    actor.steps_done = state.optimizer_steps
    if critic is not None:
        critic.steps_done = state.critic_steps
    if run.config.replay is not None and get_rank() == 0:
        from megatron_rl.batch.replay import read_groups

        state = replace(state, replay=read_groups(run.resume_point.folder))
    return state
