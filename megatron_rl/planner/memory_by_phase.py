"""Memory of each kind of GPU in each phase of an RL step.

Colocated, trainer and engine take turns: while the engine generates and at a sync, masters and moments lie in host memory and the
gradients' memory is given back; while the trainer works, the engine's weights and KV cache are. Disaggregated, each side keeps all
that it has. A phase's largest GPU decides: pipeline stages differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_rl.planner import activation_memory, memory
from megatron_rl.planner.candidate import Candidate, Workload
from megatron_rl.planner.hardware import GIB, MIB, Cluster

CUDA_CONTEXT_BYTES = GIB
"""Of each process: CUDA's context, kernels, NCCL's buffers. An assumption; a run's own log tells more."""
RESERVED_SHARE = 0.05
"""Share of a GPU that stays free for the allocator's fragmentation. An assumption."""
_PREFILL_CHUNK = 8192
"""Tokens that SGLang 0.5.23 computes at once where a prompt is read, on GPUs of 60 GB and more."""

PHASES = ("generate", "logprobs", "train", "sync")


@dataclass(frozen=True)
class PhaseMemory:
    """The most that one kind of GPU holds in one phase, in bytes by part."""

    phase: str
    gpus: str
    """`all`, `trainer` or `engine`."""
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def engine_workspace(tp: int) -> int:
    """What SGLang 0.5.23 sets aside for activations and CUDA graphs (`arg_groups/memory_hook.py`): 512 + 1.5 chunk + 1024 tp/8 MiB."""
    return int((512 + 1.5 * _PREFILL_CHUNK + 1024 * tp / 8) * MIB)


def estimate_phase_memory(job: Workload, candidate: Candidate) -> list[PhaseMemory]:
    """Every phase's largest GPU: of all GPUs where trainer and engine share them, else of either side."""
    found = []
    for phase in PHASES:
        trainer, engine = _fullest_stage(job, candidate.trainer_only, phase), _engine(job, candidate, phase)
        if candidate.colocated:
            found.append(PhaseMemory(phase, "all", _together(trainer, engine)))
        else:
            found += [PhaseMemory(phase, "trainer", trainer), PhaseMemory(phase, "engine", engine)]
    return found


def _together(trainer: dict[str, float], engine: dict[str, float]) -> dict[str, float]:
    return {part: trainer.get(part, 0) + engine.get(part, 0) for part in {**trainer, **engine}}


@lru_cache(maxsize=1 << 16)
def _fullest_stage(job: Workload, candidate: Candidate, phase: str) -> dict[str, float]:
    stages = [_trainer(job, candidate, stage, phase) for stage in candidate.extreme_stages]
    return max(stages, key=lambda parts: sum(parts.values()))


def _trainer(job: Workload, candidate: Candidate, stage: int, phase: str) -> dict[str, float]:
    held = memory.count_trainer_memory(job, candidate, stage)
    parts: dict[str, float] = {"weights": held.weights, "FP8 blocks": held.blocks + held.operands}
    if phase in ("logprobs", "train") or not candidate.colocated:
        parts |= {"gradients": held.gradients, "optimizer": held.optimizer}
    parts["reference"] = memory.count_reference_memory(job, candidate, stage)
    if phase in ("logprobs", "train"):
        passed = (activation_memory.count_training_activations if phase == "train" else activation_memory.count_logprob_activations)(
            job, candidate, stage
        )
        parts["activations"] = passed.kept + passed.working
    if phase == "sync":
        parts["sync"] = memory.count_sync_quantisation(job, candidate, stage) + (job.config.sync.bucket_mb << 20)
    return parts | {"context": CUDA_CONTEXT_BYTES}


def _engine(job: Workload, candidate: Candidate, phase: str) -> dict[str, float]:
    given_back = candidate.colocated and phase in ("logprobs", "train")
    parts: dict[str, float] = {"context": CUDA_CONTEXT_BYTES}
    if given_back:
        return parts
    weights = memory.count_engine_weights(job, candidate)
    parts["engine weights"] = weights
    if phase == "sync":
        parts["sync"] = (weights if job.config.sync.staged else 0) + (job.config.sync.bucket_mb << 20)
    return parts | {"KV cache": memory.count_kv_cache(job, candidate), "workspace": engine_workspace(candidate.rollout_tp)}


def count_offloaded_bytes(job: Workload, candidate: Candidate) -> int:
    """Host bytes of one trainer rank's masters and moments while the engine generates; 0 where the device keeps them."""
    if not candidate.colocated:
        return 0
    held = (memory.count_trainer_memory(job, candidate, stage) for stage in candidate.extreme_stages)
    return max(one.optimizer for one in held)


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a GPU that a plan may fill."""
    return cluster.gpu.memory * (1 - RESERVED_SHARE)


def spare_bytes(sides: list[PhaseMemory], cluster: Cluster) -> float:
    """Bytes left on the fullest GPU; negative where it does not fit."""
    return usable_bytes(cluster) - max(side.total for side in sides)
