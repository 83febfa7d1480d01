"""What the ranks of a small trainer hold, whole on rank 0 under Hugging Face names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.hf.write import describe_weights, write_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from parallel.digest import make_stored_tensors, view_rect
from parallel.formats import FormatOf
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, add_scale_transfers, reshard


def gather_tensors(
    named_tensors: dict[str, torch.Tensor], model: ModelGeometry, layout: Layout, format_of: FormatOf
) -> dict[str, torch.Tensor]:
    """Of every rank's `collect_named_tensors`: the checkpoint's tensors in their formats on rank 0, an empty dict elsewhere. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = build_trainer_shards(model, layout, format_of=format_of)
    checkpoint_shards = model.build_checkpoint_shards()
    own: list[tuple[Transfer, torch.Tensor]] = []
    for transfer in add_scale_transfers(reshard(sources, {0: checkpoint_shards}, format_of)):
        if transfer.source_rank == rank:
            values = view_rect(named_tensors[transfer.source], transfer.source_rect)
            values = values.clone(memory_format=torch.contiguous_format)  # of a view, pickle takes the whole buffer, a model's
            own.append((transfer, values.view(torch.uint8) if values.itemsize == 1 else values))  # gloo and pickle know no float8
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(own, gathered)
    if gathered is None:
        return {}
    tensors = make_stored_tensors(checkpoint_shards, format_of)
    for transfer, values in (pair for pairs in gathered for pair in pairs):
        target = view_rect(tensors[transfer.target], transfer.target_rect)
        target.copy_(values.view(target.dtype) if values.itemsize == 1 else values)
    return tensors


def save_live(to: Path, trainer: Any) -> None:
    """Write what the engine gets from a `support.trainer.Trainer` as a Hugging Face checkpoint. Collective."""
    geometry = ModelGeometry.from_hf_config(trainer.hf_config)
    contract: PrecisionContract = trainer.contract
    tensors = gather_tensors(trainer.collect_named_tensors(), geometry, trainer.layout, contract.format_of)
    if tensors:
        to.mkdir(parents=True)
        write_checkpoint(to, describe_weights(trainer.hf_config, contract), tensors, trainer.folder)
    dist.barrier()
