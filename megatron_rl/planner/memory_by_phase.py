"""Memory of each kind of GPU in each phase of an RL step.

Colocated, trainer and engine take turns: while the engine generates and at a sync, masters and moments lie in host memory and the
gradients' memory is given back; while the trainer works, the engine's weights and KV cache are. Disaggregated, each side keeps all
that it has. A phase's largest GPU decides: pipeline stages differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_rl.planner import activation_memory, memory
from megatron_rl.planner.candidate import Candidate, Job
from megatron_rl.planner.hardware import GIB, MIB, Cluster

CONTEXT = GIB
"""Of each process: CUDA's context, kernels, NCCL's buffers. An assumption; a run's own log tells more."""
RESERVE = 0.05
"""Share of a GPU that stays free for the allocator's fragmentation. An assumption."""
_PREFILL_CHUNK = 8192
"""Tokens that SGLang 0.5.23 computes at once where a prompt is read, on GPUs of 60 GB and more."""

PHASES = ("generate", "logprobs", "train", "sync")


@dataclass(frozen=True)
class Side:
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


def phases(job: Job, candidate: Candidate) -> list[Side]:
    """Every phase's largest GPU: of all GPUs where trainer and engine share them, else of either side."""
    found = []
    for phase in PHASES:
        trainer, engine = _fullest_stage(job, candidate.alone, phase), _engine(job, candidate, phase)
        if candidate.colocated:
            found.append(Side(phase, "all", _together(trainer, engine)))
        else:
            found += [Side(phase, "trainer", trainer), Side(phase, "engine", engine)]
    return found


def _together(trainer: dict[str, float], engine: dict[str, float]) -> dict[str, float]:
    return {part: trainer.get(part, 0) + engine.get(part, 0) for part in {**trainer, **engine}}


@lru_cache(maxsize=1 << 16)
def _fullest_stage(job: Job, candidate: Candidate, phase: str) -> dict[str, float]:
    stages = [_trainer(job, candidate, stage, phase) for stage in candidate.stages]
    return max(stages, key=lambda parts: sum(parts.values()))


def _trainer(job: Job, candidate: Candidate, stage: int, phase: str) -> dict[str, float]:
    held = memory.trainer_held(job, candidate, stage)
    parts: dict[str, float] = {"weights": held.weights, "FP8 blocks": held.blocks + held.operands}
    if phase in ("logprobs", "train") or not candidate.colocated:
        parts |= {"gradients": held.gradients, "optimizer": held.optimizer}
    parts["reference"] = memory.reference_held(job, candidate, stage)
    if phase in ("logprobs", "train"):
        passed = (activation_memory.training if phase == "train" else activation_memory.scoring)(job, candidate, stage)
        parts["activations"] = passed.kept + passed.working
    if phase == "sync":
        parts["sync"] = memory.quantised_for_sync(job, candidate, stage) + (job.config.sync.bucket_mb << 20)
    return parts | {"context": CONTEXT}


def _engine(job: Job, candidate: Candidate, phase: str) -> dict[str, float]:
    given_back = candidate.colocated and phase in ("logprobs", "train")
    parts: dict[str, float] = {"context": CONTEXT}
    if given_back:
        return parts
    weights = memory.engine_weights(job, candidate)
    parts["engine weights"] = weights
    if phase == "sync":
        parts["sync"] = (weights if job.config.sync.staged else 0) + (job.config.sync.bucket_mb << 20)
    return parts | {"KV cache": memory.kv_cache(job, candidate), "workspace": engine_workspace(candidate.rollout_tp)}


def offloaded(job: Job, candidate: Candidate) -> int:
    """Host bytes of one trainer rank's masters and moments while the engine generates; 0 where the device keeps them."""
    if not candidate.colocated:
        return 0
    held = (memory.trainer_held(job, candidate, stage) for stage in candidate.stages)
    return max(one.optimizer for one in held)


def usable(cluster: Cluster) -> float:
    """Bytes of a GPU that a plan may fill."""
    return cluster.gpu.memory * (1 - RESERVE)


def spare(sides: list[Side], cluster: Cluster) -> float:
    """Bytes left on the fullest GPU; negative where it does not fit."""
    return usable(cluster) - max(side.total for side in sides)
