"""Colocation: trainer and engine take turns with the memory of shared devices. Measures what each held in every phase.

    colocated       generate (engine) -> log-probs, train (trainer) -> sync (both) -> generate ...
    disaggregated   each keeps its memory

The engine releases its KV cache (on a GPU its weights as well) after generation and takes it again at the sync, which fills the weights.
Before the sync the trainer offloads to host memory what only an optimizer step needs; on a CPU it is there already.
"""

from __future__ import annotations

import psutil
import torch

from megatron_rl.config.placement import PlacementConfig
from megatron_rl.distributed import Rank0, gather_from_ranks
from megatron_rl.mcore.actor import Actor
from megatron_rl.rollout.engine import Engine

_MIB = 1 << 20


class ColocationManager:
    """Switches memory between trainer and engine."""

    def __init__(self, settings: PlacementConfig, actor: Actor, engine: Rank0[Engine]) -> None:
        self._colocated, self._actor, self._engine = settings.kind == "colocated", actor, engine
        self._metrics: dict[str, float] = {}

    def switch_to_trainer(self) -> None:
        """Release the engine's memory after generation, until the next sync, and reload the optimizer. Collective."""
        if self._colocated:
            self._engine.run(lambda engine: engine.release_memory())
            self._actor.reload_optimizer()

    def switch_to_engine(self) -> None:
        """Offload the optimizer after its step, before the sync."""
        if self._colocated:
            self._actor.offload_optimizer()

    def begin_phase(self) -> None:
        """Begin to measure the memory of a phase."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def end_phase(self, phase: str) -> None:
        """Record the memory held in a phase, in MiB: on a GPU its peak, on a CPU what is held at its end."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._metrics[f"memory/device_{phase}_mb"] = (total - free) / _MIB
            self._metrics[f"memory/{phase}_mb"] = torch.cuda.max_memory_allocated() / _MIB
        else:
            self._metrics[f"memory/{phase}_mb"] = psutil.Process().memory_info().rss / _MIB
            self._engine.tell(lambda engine: self._metrics.update({f"memory/engine_{phase}_mb": engine.get_memory_mb()}))

    def collect_memory_metrics(self) -> dict[str, float]:
        """Return the largest value of all ranks for each phase since the last call. Collective."""
        largest: dict[str, float] = {}
        for metrics in gather_from_ranks(self._metrics):
            largest |= {name: max(value, largest.get(name, value)) for name, value in metrics.items()}
        self._metrics = {}
        return largest
