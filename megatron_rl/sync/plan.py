"""What a sync moves: planned once from the model, the layouts and the precision contract. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_rl.precision.contract import PrecisionContract
from parallel.chunking import Chunk, make_chunks
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Shard


@dataclass(frozen=True)
class SyncPlan:
    """All that a sync needs to know beforehand; the same on every rank."""

    transfers: tuple[Transfer, ...]
    chunks: tuple[Chunk, ...]
    """What of the transfers is sent in one go, in the order in which every rank goes through them."""
    targets: dict[int, list[Shard]]
    """Engine rank -> its shards."""
    contract: PrecisionContract

    @classmethod
    def make(cls, model: ModelGeometry, train: Layout, rollout: EngineLayout, contract: PrecisionContract, chunk_bytes: int) -> SyncPlan:
        """Plan trainer -> engines, whose ranks are numbered consecutively.

        Raises GeometryError where the layouts do not fit the model or cut blocks, or where a row of a tensor exceeds `chunk_bytes`.
        """
        model = replace(model, kv_scales=contract.scales_kv_by_layer)
        sources = build_trainer_shards(model, train, format_of=contract.format_of)
        targets = build_engine_shards(model, *rollout[:3])
        transfers = add_scale_transfers(reshard(sources, targets, contract.format_of))
        return cls(tuple(transfers), tuple(make_chunks(transfers, chunk_bytes)), targets, contract)
