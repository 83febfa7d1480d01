"""Memory of each kind of GPU in each phase of an RL step.

Colocated, trainer and engine take turns. While the engine generates and during a sync, masters and moments are offloaded and the gradients'
memory is released; while the trainer works, the engine's weights and KV cache are released. A critic's optimizer and the policy's optimizer
are on the device in turn. Disaggregated, each side keeps everything. Pipeline stages differ, so the GPU that needs the most decides.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_rl.cost import activations, weights
from megatron_rl.cost.hardware import GIB, MIB, Cluster
from megatron_rl.cost.workload import Candidate, Workload

CUDA_CONTEXT_BYTES = GIB
"""Bytes of CUDA's context, kernels and NCCL's buffers of each process. An assumption; the log of a run has measured values."""
_IPC_CONTEXT_BYTES = GIB // 2
"""Bytes on a trainer GPU for each process that opens its memory from another GPU: a CUDA context without NCCL. An assumption."""
RESERVED_SHARE = 0.05
"""Share of a GPU left free for fragmentation of the allocator. An assumption."""
_PREFILL_CHUNK = 8192
"""Prompt tokens that SGLang 0.5.23 computes at once on GPUs of 60 GB and more."""

PHASES = ("generate", "logprobs", "critic", "train", "sync", "resume")
"""Phases of a plan. `critic` is the critic's optimizer steps, before the policy's; `resume` loads a checkpoint, before frozen models are
loaded. Both exist only with a critic; without one, `train` needs more than `resume`. `count_trainer_parts` also knows `checkpoint`, which
needs as much as `generate`."""


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes by part on the fullest GPU of one kind in one phase."""

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
    """Return the fullest GPU in every phase; if trainer and engine have their own GPUs, the fullest of each side."""
    phases = []
    for phase, trainer, engine in zip(list_phases(job), list_trainer_parts(job, candidate), list_engine_parts(job, candidate), strict=True):
        if candidate.colocated:
            parts = {part: trainer.get(part, 0) + engine.get(part, 0) for part in {**trainer, **engine}}
            phases.append(PhaseMemory(phase, "all", parts))
        else:
            phases += [PhaseMemory(phase, "trainer", trainer), PhaseMemory(phase, "engine", engine)]
    return phases


@lru_cache(maxsize=64)
def list_phases(job: Workload) -> list[str]:
    return [phase for phase in PHASES if phase not in ("critic", "resume") or job.critic is not None]


def list_trainer_parts(job: Workload, candidate: Candidate) -> list[dict[str, float]]:
    """Return the bytes by part on the fullest trainer GPU in every phase."""
    trainer = candidate.trainer_only
    return [_fullest_stage(job, trainer, phase) for phase in list_phases(job)]


def list_engine_parts(job: Workload, candidate: Candidate) -> list[dict[str, float]]:
    """Return the bytes by part on an engine's GPU in every phase."""
    return [_engine_parts(job, candidate, phase) for phase in list_phases(job)]


def add_ipc_contexts(memory: tuple[PhaseMemory, ...], readers: int) -> tuple[PhaseMemory, ...]:
    """Add the contexts of `readers` engine ranks on other GPUs that open a trainer GPU's memory by CUDA IPC, from the first sync on."""
    contexts = {"IPC contexts": float(readers * _IPC_CONTEXT_BYTES)}
    return tuple(each if each.gpus == "engine" else replace(each, parts=each.parts | contexts) for each in memory)


@lru_cache(maxsize=1 << 16)
def _fullest_stage(job: Workload, candidate: Candidate, phase: str) -> dict[str, float]:
    stages = [count_trainer_parts(job, candidate, stage, phase) for stage in weights.list_extreme_stages(job, candidate.train)]
    return max(stages, key=lambda parts: sum(parts.values()))


def count_trainer_parts(job: Workload, candidate: Candidate, stage: int, phase: str) -> dict[str, float]:
    """Return the bytes by part on a trainer rank of a pipeline stage in a phase."""
    rank = weights.count_trainer_memory(job, candidate.train, stage)
    resumes = phase == "resume"
    # operands of a step's new blocks are made by the next forward pass
    computes = phase in ("logprobs", "critic", "train") or (job.trains_adapters and not candidate.colocated and not resumes)
    parts: dict[str, float] = {"weights": rank.weights, "quantized": rank.blocks + (rank.operands if computes else 0)}
    parts["quantized"] += rank.transposed if phase in ("critic", "train") or (computes and not candidate.colocated) else 0
    # colocated, the optimizer returns for the policy's update; without a critic already when the engine has released its memory
    if not candidate.colocated or phase in ("train", "resume") or (phase == "logprobs" and job.critic is None):
        parts |= {"gradients": rank.gradients, "optimizer": rank.optimizer}
    has_reference = job.has_reference and not (job.trains_adapters or resumes)
    parts["reference"] = weights.count_trainer_memory(job.scored, candidate.train, stage).model if has_reference else 0
    if job.teacher is not None and not resumes:
        parts["teacher"] = weights.count_trainer_memory(job.teacher, candidate.train, stage).model
    if job.critic is not None:
        critic = weights.count_trainer_memory(job.critic, candidate.train, stage)
        parts["critic"] = critic.model + critic.transposed if phase == "critic" else critic.weights + critic.blocks
        if phase in ("critic", "resume") or not candidate.colocated:
            parts["critic"] += critic.gradients + critic.optimizer
    if phase in ("critic", "train"):
        trained = job if job.critic is None or phase == "train" else job.critic
        training = activations.count_training_activations(trained, candidate, stage)
        parts["activations"] = math.ceil(training.kept + training.working)
    if phase == "logprobs":
        scored = [each for each in (job, job.teacher) if each is not None]
        parts["activations"] = math.ceil(max(activations.count_logprob_activations(each, candidate, stage) for each in scored))
    if phase == "sync":
        parts["sync"] = weights.count_sync_memory(job, candidate, stage)
    return parts | {"context": CUDA_CONTEXT_BYTES}


def _engine_parts(job: Workload, candidate: Candidate, phase: str) -> dict[str, float]:
    parts: dict[str, float] = {"context": CUDA_CONTEXT_BYTES}
    if phase == "resume" or (candidate.colocated and phase in ("logprobs", "critic", "train")):
        return parts
    held = weights.count_engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)
    parts["engine weights"] = held
    if phase == "sync":
        parts["sync"] = (held if job.config.sync.staged else 0) + (job.config.sync.bucket_mb << 20)
    return parts | {"KV cache": weights.count_kv_cache(job, candidate), "workspace": engine_workspace(candidate.rollout_tp)}


def count_offloaded_bytes(job: Workload, candidate: Candidate) -> int:
    """Return the host bytes of a trainer rank's offloaded masters and moments, including the critic's. 0 if the device keeps them."""
    if not candidate.colocated:
        return 0
    trained = [each for each in (job, job.critic) if each is not None]
    stages = weights.list_extreme_stages(job, candidate.train)
    return max(sum(weights.count_trainer_memory(each, candidate.train, stage).optimizer for each in trained) for stage in stages)


def count_sample_bytes(job: Workload) -> int:
    """Return the host bytes of a step's samples of the greatest length on rank 0, which sends them (`batch.sample_bytes`). Every other rank
    holds those of its replica."""
    return job.trained_sequences * _count_longest_sample(job)


def count_kept_bytes(job: Workload) -> int:
    """Return the host bytes of the groups of the greatest length that rank 0 keeps for replay, 0 without [replay]."""
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
