"""Baselines of `weight_sync.py`: copies of the same number of bytes, and the common method of gathering BF16 and quantizing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.sync.plan import SyncPlan
from parallel.chunking import make_chunks
from parallel.digest import view_rect
from parallel.formats import FP8
from parallel.layout import EngineLayout, Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer
from parallel.shards import Rect

_FLAT_COLS = 4096


@dataclass(frozen=True)
class BenchSetup:
    """The measured setup; every process receives a copy."""

    model: ModelGeometry
    train: Layout
    rollout_tp: int
    repeat: int
    folder: Path  # of the transport `disk`
    device: str = "cpu"
    transports: Sequence[str] = ()
    bucket_mb: Sequence[int] = ()

    def sync_configs(self) -> dict[str, SyncConfig]:
        """Return the sync settings to measure. A name is the transport, with the bucket size if there are several."""
        return {
            f"{transport} {size} MiB" if len(self.bucket_mb) > 1 else transport: SyncConfig.model_validate(
                {"transport": transport, "dir": self.folder, "timeout": 120.0, "bucket_mb": size, "delta": "off"}
            )
            for transport in self.transports
            for size in self.bucket_mb
        }

    def precisions(self) -> tuple[bool, ...]:
        """Return the measured precisions: True for FP8, False for BF16."""
        return (True, False) if self.device == "cpu" else (True,)

    def make_plan(self, fp8: bool, settings: SyncConfig) -> SyncPlan:
        """Raise GeometryError if the layouts do not fit the model."""
        return SyncPlan.make(self.model, self.train, EngineLayout(self.rollout_tp), make_contract(fp8), settings.chunk_bytes)


def make_contract(fp8: bool) -> PrecisionContract:
    return PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified" if fp8 else "bf16"))


class PlainCopy:
    """Copies the same bytes within one process, tensor by tensor, with `copy_`. The trainer ranks share the work."""

    def __init__(self, plan: SyncPlan, rank: int, world: int) -> None:
        sizes: Counter[tuple[int, str]] = Counter()
        for transfer in plan.transfers:
            if transfer.target_rank % world == rank:
                sizes[transfer.target_rank, transfer.target] += transfer.nbytes
        self._pairs = [(torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)) for size in sizes.values()]

    def run(self) -> None:
        for source, target in self._pairs:
            target.copy_(source)


def make_flat_tensors(setup: BenchSetup) -> dict[str, torch.Tensor]:
    """Return one flat buffer for every rank of the other side, with as many bytes in total as an FP8 sync moves."""
    plan = setup.make_plan(True, SyncConfig())
    total = sum(transfer.nbytes for transfer in plan.transfers)
    rows = total // (setup.train.world_size * setup.rollout_tp * _FLAT_COLS)
    count = max(setup.train.world_size, setup.rollout_tp)
    return {f"flat{other}": torch.ones(rows, _FLAT_COLS, dtype=torch.uint8) for other in range(count)}


def make_flat_plan(setup: BenchSetup) -> SyncPlan:
    """Return a plan that moves the flat buffers with the processes, buffers, and threads of a sync, but without a model."""
    rows = make_flat_tensors(setup)["flat0"].shape[0]
    whole = Rect(0, 0, rows, _FLAT_COLS)
    pairs = [(source, target) for target in range(setup.rollout_tp) for source in range(setup.train.world_size)]
    transfers = [Transfer(source, f"flat{target}", whole, target, f"flat{source}", whole, FP8) for source, target in pairs]
    return SyncPlan(tuple(transfers), tuple(make_chunks(transfers, SyncConfig().chunk_bytes)), {}, make_contract(True))


class GatherAndQuantize:
    """The common method: gather full BF16 tensors on rank 0, rename them as in the checkpoint, and quantize them.

    Sharding and sending the result would come on top; they are left out in favor of this method.
    """

    def __init__(self, setup: BenchSetup, named_tensors: Mapping[str, torch.Tensor]) -> None:
        self._named_tensors = named_tensors
        self._shards = [{shard.name: shard for shard in shards} for shards in build_trainer_shards(setup.model, setup.train).values()]

    def run(self) -> None:
        for name in dict.fromkeys(name for shards in self._shards for name in shards):
            parts = self._gather(name)
            role = next(shards[name].role for shards in self._shards if name in shards)
            if dist.get_rank() == 0:
                for tensor in self._to_hugging_face(name, parts).values():
                    if tensor.dim() == 2 and make_contract(True).format_of(role).quantized:
                        quantize_weight(tensor, "pow2")

    def _gather(self, name: str) -> dict[int, torch.Tensor]:
        """Return the shards of a parameter by rank. Empty on all ranks but 0."""
        if dist.get_rank() != 0:
            if name in self._named_tensors:
                dist.send(self._named_tensors[name].view(torch.uint8), 0)
            return {}
        parts = {}
        for rank, shards in enumerate(self._shards):
            if name not in shards:
                continue
            if rank == 0:
                parts[0] = self._named_tensors[name]
                continue
            parts[rank] = torch.empty(shards[name].shape, dtype=torch.bfloat16)
            dist.recv(parts[rank].view(torch.uint8), rank)
        return parts

    def _to_hugging_face(self, name: str, parts: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the full checkpoint tensors assembled from the shards of all ranks."""
        whole: dict[str, torch.Tensor] = {}
        for rank, value in parts.items():
            for region in self._shards[rank][name].regions:
                tensor = region.tensor
                if tensor.name not in whole:
                    whole[tensor.name] = value.new_empty((tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols))
                view_rect(whole[tensor.name], region.tensor_rect).copy_(view_rect(value, region.shard_rect))
        return whole
