"""Runs one rank's part of a run with the run's own functions, from the checkpoint to two optimizer steps, a sync, a save and a resume.

docs/guides/rehearse.md lists the phases. Samples fill micro-batches to the last token, as `plan` assumes. Their number is the smallest that
shows everything a step does: one micro-batch more than the rank's stage has in flight, or twice as many if two micro-batches take turns.
"""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.algorithm.value_loss import ValueLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.cost.hardware import Gpu
from megatron_rl.cost.workload import MEAN_LENGTH_SHARE
from megatron_rl.distributed import is_rank0
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Actor, Critic
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.folder import checkpoint_folder, unfinished_folder
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear
from megatron_rl.mcore.layers.moe.experts import free_frozen_operands
from megatron_rl.mcore.layers.moe.grouped_experts import GroupedLinear
from megatron_rl.mcore.layers.moe.router import RoutedMicroBatch, RoutingReplay
from megatron_rl.mcore.layers.moe.token_counts import keeps_routing
from megatron_rl.mcore.model import start_megatron, stop_megatron
from megatron_rl.mcore.weights.load_weights import collect_named_tensors
from megatron_rl.observability import profiling
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rehearsal.checkpoint import RehearsedFiles
from megatron_rl.rehearsal.device import FakeGpu
from megatron_rl.rehearsal.fake_cuda import one_rank
from megatron_rl.rehearsal.hf_headers import read_headers_only
from megatron_rl.rehearsal.recorder import Phase, Recorder, find_line_of
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.training.checkpoint_manager import CheckpointManager, TrainState
from megatron_rl.training.policies import load_actor, load_critic, load_reference, load_teacher
from parallel.layout import Layout
from parallel.shards import Shard
from parallel.transport.pack import make_source_packer


@dataclass
class RankRehearsal:
    """The phases of one rank, and the fault that ended it, if any."""

    rank: int
    phases: list[Phase]
    fault: str = ""
    """Type, phase, line and message of the error, or ""."""
    error: Exception | None = None


def rehearse_rank(config: Config, rank: int, gpu: Gpu) -> RankRehearsal:
    """Run rank `rank`. An error of the program ends the rank and is part of the result."""
    layout = config.train.layout.to_layout()
    with one_rank(rank, layout.world_size, gpu) as device, tempfile.TemporaryDirectory() as scratch:
        rehearsal = RankRehearsal(rank, device.recorder.phases)
        try:
            with _observe_passes(device.recorder):
                _run(config, layout, device, Path(scratch))
        except Exception as error:
            message = (str(error).strip().splitlines() or [""])[0]
            rehearsal.fault = f"{type(error).__name__} in phase {device.recorder.phase.name} at {find_line_of(error)}: {message}"
            rehearsal.error = error
        finally:
            gc.unfreeze()
            stop_megatron()
        return rehearsal


@contextmanager
def _observe_passes(recorder: Recorder) -> Iterator[None]:
    """Context manager in which the recorder knows when a micro-batch's pass runs, and counts passes. Preparing operands for a backend
    belongs to no pass, because only the first pass after an optimizer step does it."""

    def observe(function: Any, in_pass: bool, passes: int = 0) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            before, recorder.in_pass = recorder.in_pass, in_pass
            recorder.phase.passes += passes
            try:
                return function(*args, **options)
            finally:
                recorder.in_pass = before

        return run

    begin = RoutingReplay.begin

    def begin_router(router: RoutingReplay) -> RoutedMicroBatch | None:
        batch = begin(router)
        recorder.phase.choices += batch is None or not batch.replay or batch.routed_experts is None
        return batch

    with ExitStack() as patches:
        for name in ("forward_step", "backward_step"):
            patches.enter_context(mock.patch.object(schedules, name, observe(getattr(schedules, name), True)))
        patches.enter_context(mock.patch.object(profiling, "begin_micro_batch", observe(profiling.begin_micro_batch, True, 1)))
        patches.enter_context(mock.patch.object(RoutingReplay, "begin", begin_router))
        for owner in (QuantizedLinear, GroupedLinear):
            patches.enter_context(mock.patch.object(owner, "operand", property(observe(vars(owner)["operand"].fget, False))))
        yield


def _run(config: Config, layout: Layout, gpu: FakeGpu, scratch: Path) -> None:
    begin, source, hf_config = gpu.recorder.begin, config.model.folder, read_config(config.model.folder)
    begin("build")
    start_megatron(layout, config.train.seed)
    with read_headers_only(gpu, source, scratch) as folder:
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
        actor, shards = load_actor(config, layout, hf_config)
        reference = load_reference(config, layout, hf_config, actor)
        critic = load_critic(config, layout, hf_config)
    teacher = None
    if config.teacher is not None:
        (scratch / "teacher").mkdir()
        with read_headers_only(gpu, config.teacher.path, scratch / "teacher") as folder:
            teacher = load_teacher(config.model_copy(update={"teacher": config.teacher.model_copy(update={"path": folder})}), layout)
    if critic is not None and config.placement.kind == "colocated":
        critic.offload_optimizer()
    samples = make_samples(config, layout, dist.get_rank(), max(actor.chunks[0].config.at_once))
    replay = config.algorithm.routing_replay
    _give_records(samples, actor, replay == "engine")
    begin("logprobs")
    for policy in filter(None, (reference, teacher, actor)):
        for sample, logprobs in zip(samples, policy.compute_logprobs(samples)[0], strict=True):
            sample.old_logprobs = sample.reference_logprobs = sample.teacher_logprobs = logprobs
    loss = PolicyLoss(config.algorithm, config.teacher)
    _train_critic(config, actor, critic, samples, gpu, "critic 1")
    _give_records(samples, actor, replay == "engine" or keeps_routing(config.algorithm))
    begin("update 1")
    actor.update(samples, loss)
    if config.placement.kind == "colocated":
        begin("off-load")
        actor.offload_optimizer()
    begin("sync")
    _pack_chunks(config, layout, actor, shards, hf_config)
    begin("checkpoint")
    files = RehearsedFiles(gpu, config.make_trained_geometry(hf_config), layout)
    with files.replace_disk(), read_headers_only(gpu, source, scratch):  # a checkpoint has a copy of layers that are not trained
        saved = _save(config, layout, actor, critic, hf_config, scratch)
        files.complete_as_rank0(saved / "mcore")
    gpu.recorder.phase.written = files.nbytes
    if config.placement.kind == "colocated" and critic is None:
        begin("restore")
        actor.reload_optimizer()
    _give_records(samples, actor, replay == "engine")
    begin("logprobs 2")
    for policy in filter(None, (actor, reference, teacher)):
        policy.compute_logprobs(samples)
    _train_critic(config, actor, critic, samples, gpu, "critic 2")
    _give_records(samples, actor, replay == "engine" or keeps_routing(config.algorithm))
    begin("update 2")
    actor.update(samples, loss)
    del reference, teacher, policy  # a run resumes before it loads frozen models and before it computes
    free_frozen_operands(actor.chunks)
    gc.unfreeze()
    gc.collect()
    begin("resume")
    if critic is not None:
        critic.reload_optimizer()
    with files.replace_disk():
        of_critic = None if critic is None else (critic.model, critic.optimizer)
        load_run_checkpoint(saved, actor.model, actor.optimizer, {"adam_step": 1, "critic_adam_step": 1}, True, of_critic)
    gpu.recorder.end()


def _train_critic(config: Config, actor: Actor, critic: Critic | None, samples: list[TrainingSample], gpu: FakeGpu, phase: str) -> None:
    """Compute values and take an optimizer step, as `training.critic_trainer` does. Do nothing without a critic."""
    if critic is None:
        return
    colocated = config.placement.kind == "colocated"
    if colocated:
        actor.offload_optimizer()
    gpu.recorder.begin(phase)
    for sample, values in zip(samples, critic.compute_values(samples), strict=True):
        sample.values = sample.returns = values
    critic.reload_optimizer()
    critic.update(samples, ValueLoss(config.critic.cliprange_value))
    if colocated:
        critic.offload_optimizer()
        gpu.recorder.begin(f"restore after {phase}")
        actor.reload_optimizer()


def _save(config: Config, layout: Layout, actor: Actor, critic: Critic | None, hf_config: dict[str, Any], run: Path) -> Path:
    """Save the first step's policy as the training loop does, and return its folder. Only rank 0 renames a finished folder."""
    manager = CheckpointManager(config, layout, run, actor, hf_config, lambda _: None, -1, critic)
    critic_steps = 0 if critic is None else critic.steps_done
    manager.write(TrainState(1, actor.steps_done, (0.0, 0.0), dict, critic_steps=critic_steps), last=True)
    folder = checkpoint_folder(run, 1)
    return folder if is_rank0() else unfinished_folder(folder)


def _pack_chunks(config: Config, layout: Layout, actor: Actor, shards: list[Shard], hf_config: dict[str, Any]) -> None:
    """Pack and hash this rank's chunks as a sync does, in buffers of `sync.bucket_mb`."""
    contract = PrecisionContract.from_config(config.precision)
    geometry, rollout = config.make_geometry(hf_config), config.rollout.to_layout()
    own = SyncPlan.make(geometry, layout, rollout, contract, config.sync.chunk_bytes, dist.get_rank()).chunks
    packer = make_source_packer(collect_named_tensors(actor.model, shards, contract), own, dist.get_rank())
    ring = torch.empty(config.sync.bucket_mb << 20, dtype=torch.uint8, device="cuda")
    for sources, nbytes in {chunk.sources: chunk.nbytes for chunk in own}.items():  # bytes that several engines receive are hashed once
        packer.pack(sources, ring[:nbytes], True)


def _give_records(samples: list[TrainingSample], actor: Actor, known: bool) -> None:
    """Give samples of equal length a record of evenly chosen experts if `known`, else no record."""
    shape, record = actor.routing.shape, torch.empty(0)
    if known and shape is not None:
        chosen = torch.arange((samples[0].length - 1) * shape.top_k).view(-1, 1, shape.top_k) % shape.num_experts
        record = chosen.to(torch.uint8 if shape.num_experts <= 256 else torch.int16).repeat(1, shape.num_layers, 1)
    for sample in samples:
        sample.routed_experts = record


def make_samples(config: Config, layout: Layout, rank: int, at_once: int) -> list[TrainingSample]:
    """Return the samples of a rank's replica, of equal length near the mean, which fill the largest micro-batches that a run can have.

    Prompts have one token, because log-probs of all positions take the most memory.
    """
    room, longest = config.train.micro_batch_tokens * layout.cp, config.longest_sequence
    count = round(room / (MEAN_LENGTH_SHARE * longest)) if room >= longest else 1  # a longer sequence has a pass of its own
    chunks = 2 * layout.cp  # a sequence is padded to a multiple of them
    positions = max(room, longest) // count // chunks * chunks
    micro_batches = layout.pp - layout.coordinates(rank).pp + 1
    if layout.vpp > 1:
        micro_batches = 2 * layout.pp  # Megatron requires a multiple of pp
    micro_batches *= at_once
    prompt, answer = torch.ones(1, dtype=torch.int32), torch.full((positions,), 2)  # the last token has no position
    return [TrainingSample(prompt, answer, advantage=1.0, number=number) for number in range(count * micro_batches)]
