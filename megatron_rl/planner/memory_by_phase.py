"""Memory of each kind of GPU in each phase of an RL step.

Colocated, trainer and engine take turns: while the engine generates and during a sync, masters and moments are in host memory and the
gradients' memory is released; while the trainer works, the engine's weights and KV cache are released. With a critic its optimizer is on
the device for its update, then the policy's for that, never both. Disaggregated, each side keeps everything. The largest GPU of a phase
decides: pipeline stages differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.planner import activation_memory, memory
from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.hardware import GIB, MIB, Cluster

CUDA_CONTEXT_BYTES = GIB
"""Of each process: CUDA's context, kernels, NCCL's buffers. An assumption; the log of a run has measured values."""
_IPC_CONTEXT_BYTES = GIB // 2
"""On a GPU of the trainer, for each process that opens its memory from another GPU: a CUDA context without NCCL. An assumption."""
RESERVED_SHARE = 0.05
"""Share of a GPU left to the allocator's fragmentation. An assumption."""
_PREFILL_CHUNK = 8192
"""Prompt tokens that SGLang 0.5.23 computes at once on GPUs of 60 GB and more."""

PHASES = ("generate", "logprobs", "critic", "train", "sync", "resume")
"""Where there is a critic, `critic`: its optimizer steps, before the policy's; and `resume`: a checkpoint is loaded, frozen models not yet.
Without one a train phase needs more than that. `checkpoint`, which `count_trainer_parts` knows too, needs what generating needs."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes, by part, on the fullest GPU of one kind in one phase."""

    phase: str
    gpus: str
    """`all`, `trainer` or `engine`."""
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def engine_workspace(tp: int) -> int:
    """Return the bytes that SGLang 0.5.23 reserves for activations and CUDA graphs: 512 + 1.5 chunk + 1024 tp/8 MiB
    (`arg_groups/memory_hook.py`)."""
    return int((512 + 1.5 * _PREFILL_CHUNK + 1024 * tp / 8) * MIB)


def estimate_phase_memory(job: Workload, candidate: Candidate) -> list[PhaseMemory]:
    """Return the fullest GPU of every phase: of all GPUs where trainer and engine share them, else of either side."""
    phases = []
    for phase in PHASES:
        if phase in ("critic", "resume") and job.critic is None:
            continue
        trainer, engine = _fullest_stage(job, candidate.trainer_only, phase), _engine_parts(job, candidate, phase)
        if candidate.colocated:
            parts = {part: trainer.get(part, 0) + engine.get(part, 0) for part in {**trainer, **engine}}
            phases.append(PhaseMemory(phase, "all", parts))
        else:
            phases += [PhaseMemory(phase, "trainer", trainer), PhaseMemory(phase, "engine", engine)]
    return phases


def add_ipc_contexts(memory: tuple[PhaseMemory, ...], readers: int) -> tuple[PhaseMemory, ...]:
    """Add what `readers`, engine ranks on other GPUs, hold on a GPU of the trainer whose memory they have opened by CUDA IPC: from the
    first sync on, in all phases."""
    contexts = {"IPC contexts": float(readers * _IPC_CONTEXT_BYTES)}
    return tuple(each if each.gpus == "engine" else replace(each, parts=each.parts | contexts) for each in memory)


@lru_cache(maxsize=1 << 16)
def _fullest_stage(job: Workload, candidate: Candidate, phase: str) -> dict[str, float]:
    stages = [count_trainer_parts(job, candidate, stage, phase) for stage in candidate.extreme_stages]
    return max(stages, key=lambda parts: sum(parts.values()))


def count_trainer_parts(job: Workload, candidate: Candidate, stage: int, phase: str) -> dict[str, float]:
    """Return the bytes, by part, of a trainer rank of a pipeline stage in a phase."""
    rank = memory.count_trainer_memory(job, candidate.train, stage)
    resumes = phase == "resume"
    # a step's new blocks have no operands until the next forward pass
    computes = phase in ("logprobs", "critic", "train") or (job.trains_adapters and not candidate.colocated and not resumes)
    parts: dict[str, float] = {"weights": rank.weights, "quantized": rank.blocks + (rank.operands if computes else 0)}
    if _has_optimizer(job, candidate, phase):
        parts |= {"gradients": rank.gradients, "optimizer": rank.optimizer}
    has_reference = job.has_reference and not (job.trains_adapters or resumes)  # frozen: no gradients
    parts["reference"] = memory.count_trainer_memory(job.scored, candidate.train, stage).model if has_reference else 0
    if job.teacher is not None and not resumes:
        parts["teacher"] = memory.count_trainer_memory(job.teacher, candidate.train, stage).model
    if job.critic is not None:
        critic = memory.count_trainer_memory(job.critic, candidate.train, stage)
        parts["critic"] = critic.model if phase == "critic" else critic.weights + critic.blocks
        if phase in ("critic", "resume") or not candidate.colocated:
            parts["critic"] += critic.gradients + critic.optimizer
    if phase in ("critic", "train"):
        trained = job if job.critic is None or phase == "train" else job.critic
        activations = activation_memory.count_training_activations(trained, candidate, stage)
        parts["activations"] = activations.kept + activations.working
    if phase == "logprobs":
        parts["activations"] = max(
            activation_memory.count_logprob_activations(each, candidate, stage) for each in (job, job.teacher) if each is not None
        )
    if phase == "sync":
        parts["sync"] = memory.count_sync_quantization(job, candidate, stage) + (job.config.sync.bucket_mb << 20)
    return parts | {"context": CUDA_CONTEXT_BYTES}


def _has_optimizer(job: Workload, candidate: Candidate, phase: str) -> bool:
    """Return whether gradients, masters and moments of the policy are on the device: colocated, they come for its update after a critic's,
    and without one when the engine has released its memory. A run that resumes loads both."""
    return not candidate.colocated or phase in ("train", "resume") or (phase == "logprobs" and job.critic is None)


def _engine_parts(job: Workload, candidate: Candidate, phase: str) -> dict[str, float]:
    parts: dict[str, float] = {"context": CUDA_CONTEXT_BYTES}
    if phase == "resume" or (candidate.colocated and phase in ("logprobs", "critic", "train")):
        return parts
    weights = memory.count_engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)
    parts["engine weights"] = weights
    if phase == "sync":
        parts["sync"] = (weights if job.config.sync.staged else 0) + (job.config.sync.bucket_mb << 20)
    return parts | {"KV cache": memory.count_kv_cache(job, candidate), "workspace": engine_workspace(candidate.rollout_tp)}


def count_offloaded_bytes(job: Workload, candidate: Candidate) -> int:
    """Return the host bytes of one trainer rank's masters and moments, those of the critic too, while the engine generates; 0 where the
    device keeps them."""
    if not candidate.colocated:
        return 0
    trained = [each for each in (job, job.critic) if each is not None]
    stages = candidate.extreme_stages
    return max(sum(memory.count_trainer_memory(each, candidate.train, stage).optimizer for each in trained) for stage in stages)


def count_sample_bytes(job: Workload) -> int:
    """Return the host bytes of a step's samples, all of the greatest length, as rank 0 holds and sends them (`batch.sample_bytes`); every
    other rank holds its replica's."""
    return job.trained_sequences * _count_longest_sample(job)


def count_kept_bytes(job: Workload) -> int:
    """Return the host bytes of the groups that rank 0 keeps to train on again, all of the greatest length; 0 without [replay]."""
    replay = job.config.replay
    return 0 if replay is None else replay.buffer_size * job.config.rollout.group_size * _count_longest_sample(job)


def _count_longest_sample(job: Workload) -> int:
    config, experts = job.config, job.model.experts
    per_token = 4 + 4 + (config.placement.max_staleness > 0 or config.replay is not None)  # token, log-prob, age
    if experts is not None and config.algorithm.routing_replay == "engine":
        per_token += job.model.layers * experts.top_k * (1 if experts.count <= 256 else 2)
    return config.longest_sequence * per_token


def usable_bytes(cluster: Cluster) -> float:
    """Return the bytes of a GPU that a plan may fill."""
    return cluster.gpu.memory * (1 - RESERVED_SHARE)
