"""Who holds which memory when: the turns of trainer and engine on shared devices, and what each held in every phase.

    colocated       generate (engine) -> log-probs, train (trainer) -> sync (both) -> generate ...
    disaggregated   each keeps what it has

The engine gives back its KV cache (on a GPU its weights as well) when it has generated, and takes it again at the sync, which fills the
weights. Before the sync the trainer sends to host memory what only an optimizer step needs; on a CPU it lies there already, and stays.
"""

from __future__ import annotations

import psutil
import torch

from megatron_rl.config.placement import PlacementConfig
from megatron_rl.distributed import gather_from_ranks, run_on_rank0
from megatron_rl.mcore.actor import Actor
from megatron_rl.rollout.engine import Engine

_MIB = 1 << 20


class ColocationManager:
    """Of one run. `engine` exists on rank 0 only; where it has none, all but the trainer's memory is left alone."""

    def __init__(self, settings: PlacementConfig, actor: Actor, engine: Engine | None) -> None:
        self._colocated, self._actor, self._engine = settings.kind == "colocated", actor, engine
        self._held: dict[str, float] = {}

    def switch_to_trainer(self) -> None:
        """The engine has generated all that this step needs; it serves again after the next sync. Collective."""
        if self._colocated:
            run_on_rank0(self._release_engine)
            self._actor.reload_optimizer()

    def switch_to_engine(self) -> None:
        """The optimizer has done its step; a sync follows."""
        if self._colocated:
            self._actor.offload_optimizer()

    def begin_phase(self) -> None:
        """Of a phase."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def end_phase(self, phase: str) -> None:
        """Of a phase: notes what is held, on a GPU at most."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._held[f"memory/device_{phase}_mb"] = (total - free) / _MIB
            self._held[f"memory/{phase}_mb"] = torch.cuda.max_memory_allocated() / _MIB
        else:
            self._held[f"memory/{phase}_mb"] = psutil.Process().memory_info().rss / _MIB
            if self._engine is not None:
                self._held[f"memory/engine_{phase}_mb"] = self._engine.get_memory_mb()

    def _release_engine(self) -> None:
        if self._engine is not None:
            self._engine.release_memory()

    def collect_memory_metrics(self) -> dict[str, float]:
        """Of the phases since the last call: the largest value of all ranks. Collective."""
        found: dict[str, float] = {}
        for held in gather_from_ranks(self._held):
            found |= {name: max(value, found.get(name, value)) for name, value in held.items()}
        self._held = {}
        return found
