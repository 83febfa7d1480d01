"""The plan of all syncs of a run, computed once from the model, the layouts and the precision contract. No torch. A trainer rank of a run
plans what it sends itself (`parallel.own_transfers`); tools and tests also plan for all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_rl.precision.contract import PrecisionContract
from parallel.adapters import is_adapter
from parallel.chunking import Chunk, join_chunks, make_chunks, resize
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_megatron_shards, build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.own_transfers import list_own_parts, make_cuts, plan_own_transfers
from parallel.reshard import Transfer, add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards, build_sglang_shards
from parallel.shards import Shard


class EngineShards(Mapping[int, list[Shard]]):
    """`build_engine_shards`, built when they are first read."""

    def __init__(self, model: ModelGeometry, rollout: EngineLayout) -> None:
        self._model, self._rollout = model, rollout
        self._shards: dict[int, list[Shard]] = {}  # by rank of an engine

    def __getitem__(self, rank: int) -> list[Shard]:
        if not 0 <= rank < len(self):
            raise KeyError(rank)
        if (own := rank % self._rollout.tp) not in self._shards:
            self._shards[own] = build_sglang_shards(self._model, self._rollout.tp, own, self._rollout.ep)
        return self._shards[own]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._rollout.engines * self._rollout.tp


@dataclass(frozen=True)
class SyncPlan:
    """What every sync moves: what one trainer rank sends, or with `SyncPlan.make(rank=None)`, what all ranks send."""

    transfers: tuple[Transfer, ...]
    chunks: tuple[Chunk, ...]  # the transfers cut into messages, in the order in which a rank sends them
    targets: Mapping[int, list[Shard]]  # shards by engine rank
    contract: PrecisionContract
    sources: Mapping[int, Sequence[Shard]] = field(default_factory=dict)  # shards of the trainer ranks that the plan is for
    has_adapters: bool = False  # whether training changes only adapters, and the scales of the KV cache

    @classmethod
    def make(
        cls,
        model: ModelGeometry,
        train: Layout,
        rollout: EngineLayout,
        contract: PrecisionContract,
        chunk_bytes: int,
        rank: int | None = None,
    ) -> SyncPlan:
        """Plan syncs from trainer ranks to engine ranks, or only what trainer rank `rank` sends. Raise GeometryError for layouts that do
        not fit, or rows over `chunk_bytes`."""
        model, rollout = replace(model, kv_scales=contract.scales_kv_by_layer), EngineLayout(*rollout)
        has_adapters = model.adapters is not None
        if rank is None:
            sources = build_trainer_shards(model, train, format_of=contract.format_of)
            targets = build_engine_shards(model, *rollout[:3])
            transfers = add_scale_transfers(reshard(sources, targets, contract.format_of))
            return cls(tuple(transfers), tuple(cut_into_chunks(transfers, chunk_bytes)), targets, contract, sources, has_adapters)
        transfers = plan_own_transfers(model, train, rollout, contract.format_of, rank)
        parts, chunks = list_own_parts(model, train, rank), list[Chunk]()
        for first, changes in ((0, False), (FIRST_CHANGING, True)) if has_adapters else ((0, None),):
            cuts = make_cuts(model, rollout, contract.format_of, chunk_bytes, parts, partial(_is_in, changes))
            own = join_chunks((transfer for transfer in transfers if _is_in(changes, transfer.target)), cuts)
            chunks += [replace(chunk, buffer=first + chunk.buffer) for chunk in own] if first else own
        chunks = resize(chunks, [chunk.nbytes for chunk in chunks]) if has_adapters else chunks
        sources = {rank: build_megatron_shards(model, train, train.coordinates(rank), format_of=contract.format_of)}
        return cls(tuple(transfers), tuple(chunks), EngineShards(model, rollout), contract, sources, has_adapters)

    def freezes(self, chunk: Chunk) -> bool:
        """Return whether training does not change a chunk: with adapters, the base model's weights."""
        return self.has_adapters and not changes_beside_adapters(chunk.sources[0][0])


def cut_into_chunks(transfers: Sequence[Transfer], chunk_bytes: int) -> list[Chunk]:
    """Return the chunks of all trainer ranks. Raise GeometryError as `make_chunks` does."""
    parts: tuple[list[Transfer], list[Transfer]] = ([], [])  # with adapters, what changes gets chunks of its own, sent alone later
    has_adapters = any(is_adapter(transfer.source) for transfer in transfers)
    for transfer in transfers:
        parts[has_adapters and changes_beside_adapters(transfer.target)].append(transfer)
    chunks, first = list[Chunk](), 0
    for part in parts:
        cut = make_chunks(part, chunk_bytes)
        chunks += [replace(chunk, buffer=first + chunk.buffer) for chunk in cut] if first else cut
        first = FIRST_CHANGING
    return resize(chunks, [chunk.nbytes for chunk in chunks])


FIRST_CHANGING = 1 << 32
"""Number of the first buffer of tensors that change beside frozen weights, so that these buffers come after all others."""


def _is_in(changes: bool | None, name: str) -> bool:
    """Return whether an engine tensor is among those that change beside adapters, or among the others; with None, all are."""
    return changes is None or changes_beside_adapters(name) == changes


def changes_beside_adapters(name: str) -> bool:
    """Return whether a parameter changes beside frozen weights: each step measures the scales of the KV cache."""
    return is_adapter(name) or name.endswith(".kv_scales")
