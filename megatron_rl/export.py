"""Hugging Face checkpoints out of a Megatron model: BF16 or FP32 masters, or the very FP8 or INT8 bytes that the engine is given.

The same geometry as the sync: the checkpoint is one more target layout, every tensor whole, on rank 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl import hf
from megatron_rl.errors import UserError
from megatron_rl.precision import PrecisionContract
from parallel.buckets import planes_of
from parallel.geometry import ModelGeometry
from parallel.layout import Layout
from parallel.megatron import trainer_shards
from parallel.plan import moves, reshard
from parallel.regions import region

_TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}


def gather_tensors(
    planes: dict[str, torch.Tensor],
    model: ModelGeometry,
    layout: Layout,
    fp8_roles: frozenset[str],
    high: str,
    int8_roles: frozenset[str] = frozenset(),
) -> dict[str, torch.Tensor]:
    """Collects the checkpoint's tensors on rank 0 (elsewhere: an empty dict); collective. FP8 and INT8 roles come as bytes and scales.

    `planes` is this rank's `mcore.weights.planes`; what is not quantised is cast to `high` ("bf16" or "fp32").
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = trainer_shards(model, layout, quantised=bool(fp8_roles))
    targets = {0: model.checkpoint_shards()}
    mine = []
    for move in moves(reshard(sources, targets, fp8_roles, int8_roles=int8_roles)):
        if move.source_rank == rank:
            mine.append((move, region(planes[move.source], move.source_rect).contiguous()))
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object([(move, _as_bytes(value) if move.kind == "fp8" else value) for move, value in mine], gathered)
    if gathered is None:
        return {}
    kinds = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "scale": torch.float32, "fp32": torch.float32, "high": _TORCH[high]}
    found: dict[str, torch.Tensor] = {}
    shapes = {plane.name: (plane.rows, plane.cols) for plane in planes_of(targets, fp8_roles, 4, int8_roles)}
    vectors = {tensor.name for tensor in model.tensors().values() if tensor.vector}
    for move, value in (pair for part in gathered for pair in part):
        shape = shapes[move.target][:1] if move.target in vectors else shapes[move.target]
        tensor = found.setdefault(move.target, torch.empty(shape, dtype=kinds[move.kind]))
        region(tensor, move.target_rect).copy_(value.view(torch.float8_e4m3fn) if move.kind == "fp8" else value)
    return found


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.uint8)  # gloo and pickling know uint8, not float8


def save_hf(
    folder: Path, planes: dict[str, torch.Tensor], hf_config: dict[str, Any], layout: Layout, contract: PrecisionContract, tokenizer: Path
) -> None:
    """Writes a whole Hugging Face checkpoint folder from all ranks' planes; collective, rank 0 writes.

    FP8 or INT8 where the engine is (with `quantization_config`), else every tensor in `contract.high`.
    """
    model = ModelGeometry.from_hf_config(hf_config)
    tensors = gather_tensors(planes, model, layout, contract.fp8_roles(), contract.high, contract.int8_roles())
    if tensors:
        config = {**hf_config, "torch_dtype": {"bf16": "bfloat16", "fp32": "float32"}[contract.high]}
        config.pop("quantization_config", None)
        quantization = contract.hf_quantization_config()
        if quantization:
            config["quantization_config"] = quantization
        with hf.whole_folder(folder) as temporary:
            hf.write_checkpoint(temporary, config, tensors, tokenizer)
    dist.barrier()


def export_checkpoint(checkpoint: Path, output: Path, precision: str) -> None:
    """The command `export`: a run's checkpoint to a Hugging Face folder, `precision` "bf16", "fp8" or "int8".

    FP8 blocks and INT8 channels are quantised as a sync does; everything else keeps the run's high-precision dtype.
    Raises UserError when `checkpoint` is none, or `output` exists.
    """
    if output.exists():
        raise UserError("--output", str(output), "exists already", "name a new folder")
    from megatron_rl.mcore.checkpoint import load_alone

    model, shards, saved, hf_config = load_alone(checkpoint)
    from megatron_rl.mcore.weights import planes

    to = {"bf16": {"mode": "bf16", "high": "bf16"}, "fp8": {"mode": "fp8_unified"}, "int8": {"mode": "int8_rollout"}}
    contract = PrecisionContract.of(saved.model_copy(update=to[precision]))
    save_hf(output, planes(model, shards, contract), hf_config, Layout(), contract, checkpoint / "hf")
