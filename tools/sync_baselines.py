"""What `bench_sync.py` measures a sync against: copies of as many bytes, and the common way of gathering BF16 and quantising it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.sync.plan import SyncPlan
from parallel.chunking import make_chunks
from parallel.digest import view_rect
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer
from parallel.shards import Rect

_FLAT_COLS = 4096


@dataclass(frozen=True)
class BenchSetup:
    """What all processes are told."""

    model: ModelGeometry
    train: Layout
    rollout_tp: int
    repeat: int
    folder: str


def contract(fp8: bool) -> PrecisionContract:
    return PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified" if fp8 else "bf16"))


class PlainCopy:
    """The same bytes, tensor by tensor, from memory to memory with `copy_`: as flat as a copy can be, no layouts, no other process.

    One core for each engine rank, as far as there are trainer ranks to do it.
    """

    def __init__(self, plan: SyncPlan, rank: int, world: int) -> None:
        sizes: Counter[tuple[int, str]] = Counter()
        for transfer in plan.transfers:
            if transfer.target_rank % world == rank:
                sizes[transfer.target_rank, transfer.target] += plan.count_bytes(transfer)
        self._pairs = [(torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)) for size in sizes.values()]

    def run(self) -> None:
        for source, target in self._pairs:
            target.copy_(source)


def flat_tensors(setup: BenchSetup) -> dict[str, torch.Tensor]:
    """One run of bytes for every rank of the other side, on either side; together as many bytes as an FP8 sync moves."""
    plan = SyncPlan.make(setup.model, setup.train, (setup.rollout_tp, 1), contract(True), SyncConfig().chunk_bytes)
    total = sum(map(plan.count_bytes, plan.transfers))
    rows = total // (setup.train.world_size * setup.rollout_tp * _FLAT_COLS)
    count = max(setup.train.world_size, setup.rollout_tp)
    return {f"flat{other}": torch.ones(rows, _FLAT_COLS, dtype=torch.uint8) for other in range(count)}


def flat_plan(setup: BenchSetup) -> SyncPlan:
    """Moves those runs of bytes through shared memory: the same processes, buffers and threads as a sync, no model, no proof."""
    rows = flat_tensors(setup)["flat0"].shape[0]
    everything = Rect(0, 0, rows, _FLAT_COLS)
    pairs = [(source, target) for target in range(setup.rollout_tp) for source in range(setup.train.world_size)]
    transfers = [Transfer(source, f"flat{target}", everything, target, f"flat{source}", everything, "fp8") for source, target in pairs]
    return SyncPlan(tuple(transfers), tuple(make_chunks(transfers, SyncConfig().chunk_bytes, "bf16")), {}, contract(True))


class GatherAndQuantise:
    """The common way, written plainly: whole BF16 tensors are gathered on rank 0, renamed as in the checkpoint, and quantised.

    What then still had to be done, to send the result and to cut it for the engine's ranks, is left out in its favour.
    """

    def __init__(self, setup: BenchSetup, named_tensors: Mapping[str, torch.Tensor]) -> None:
        self._layout, self._named_tensors = setup.train, named_tensors
        self._shards = [{shard.name: shard for shard in shards} for shards in build_trainer_shards(setup.model, setup.train).values()]

    def run(self) -> None:
        names = list(dict.fromkeys(name for shards in self._shards for name in shards))
        for name in names:
            parts = self._gather(name)
            if dist.get_rank() == 0:
                for tensor in self._to_hugging_face(name, parts).values():
                    if tensor.dim() == 2 and self._role(name) in contract(True).fp8_roles:
                        quantize_weight(tensor, "pow2")

    def _role(self, name: str) -> str:
        return next(shards[name].role for shards in self._shards if name in shards)

    def _gather(self, name: str) -> dict[int, torch.Tensor]:
        """Rank 0: every rank's shard of a parameter."""
        rank = dist.get_rank()
        if rank != 0:
            if name in self._named_tensors:
                dist.send(self._named_tensors[name].view(torch.uint8), 0)
            return {}
        found = {}
        for other, shards in enumerate(self._shards):
            if name not in shards:
                continue
            shard = shards[name]
            if other == 0:
                found[0] = self._named_tensors[name]
                continue
            found[other] = torch.empty((shard.rows,) if shard.vector else (shard.rows, shard.cols), dtype=torch.bfloat16)
            dist.recv(found[other].view(torch.uint8), other)
        return found

    def _to_hugging_face(self, name: str, parts: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors, whole."""
        whole: dict[str, torch.Tensor] = {}
        for rank, value in parts.items():
            for region in self._shards[rank][name].regions:
                tensor = region.tensor
                if tensor.name not in whole:
                    whole[tensor.name] = value.new_empty((tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols))
                view_rect(whole[tensor.name], region.tensor_rect).copy_(view_rect(value, region.shard_rect))
        return whole
