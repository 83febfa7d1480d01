"""The plan of all syncs of a run, computed once from the model, the layouts and the precision contract. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_rl.precision.contract import PrecisionContract
from parallel.adapters import is_adapter
from parallel.chunking import Chunk, make_chunks, resize
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Shard


@dataclass(frozen=True)
class SyncPlan:
    """What every sync moves; the same on every rank."""

    transfers: tuple[Transfer, ...]
    chunks: tuple[Chunk, ...]  # the transfers cut into messages, in the order in which every rank handles them
    targets: dict[int, list[Shard]]  # shards by engine rank
    contract: PrecisionContract

    @classmethod
    def make(cls, model: ModelGeometry, train: Layout, rollout: EngineLayout, contract: PrecisionContract, chunk_bytes: int) -> SyncPlan:
        """Plan syncs from trainer ranks to engine ranks. Raise GeometryError for layouts that do not fit, or rows over `chunk_bytes`."""
        transfers, targets = plan_transfers(model, train, rollout, contract)
        return cls(tuple(transfers), tuple(cut_into_chunks(transfers, chunk_bytes)), targets, contract)

    @property
    def frozen(self) -> frozenset[int]:
        """Numbers of the chunks that training does not change: with adapters, the base model's weights. Empty without adapters."""
        if not any(is_adapter(transfer.source) for transfer in self.transfers):
            return frozenset()
        return frozenset(number for number, chunk in enumerate(self.chunks) if not _changes_beside_adapters(chunk.sources[0][0]))


def plan_transfers(
    model: ModelGeometry, train: Layout, rollout: EngineLayout, contract: PrecisionContract
) -> tuple[list[Transfer], dict[int, list[Shard]]]:
    """Return all transfers, and the shards by engine rank. Raise GeometryError as `SyncPlan.make` does."""
    model = replace(model, kv_scales=contract.scales_kv_by_layer)
    sources = build_trainer_shards(model, train, format_of=contract.format_of)
    targets = build_engine_shards(model, *rollout[:3])
    return add_scale_transfers(reshard(sources, targets, contract.format_of)), targets


def cut_into_chunks(transfers: Sequence[Transfer], chunk_bytes: int, source: int | None = None) -> list[Chunk]:
    """Return the chunks of all trainer ranks, or of rank `source` only. Raise GeometryError as `make_chunks` does."""
    if not any(is_adapter(transfer.source) for transfer in transfers):
        return make_chunks(transfers, chunk_bytes, source)
    parts: tuple[list[Transfer], list[Transfer]] = (
        [],
        [],
    )  # what changes gets chunks of its own, which alone are sent after the first sync
    for transfer in transfers:
        parts[_changes_beside_adapters(transfer.source)].append(transfer)
    chunks = [chunk for part in parts for chunk in make_chunks(part, chunk_bytes, source)]
    return resize(chunks, [chunk.nbytes for chunk in chunks])


def _changes_beside_adapters(name: str) -> bool:
    """Return whether a parameter changes beside frozen weights: each step measures the scales of the KV cache."""
    return is_adapter(name) or name.endswith(".kv_scales")
