"""Hugging Face checkpoints from a Megatron model: BF16 or FP32 masters, or the very quantised bytes that the engine gets. Also from
another Hugging Face checkpoint, in another precision. Either with the wider matrices of `hf.align`.

The same geometry as the sync: the checkpoint is one more target layout, every tensor whole, on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.align import Alignment, align_config, is_scaled, widen
from megatron_rl.hf.files import read_config
from megatron_rl.hf.hub import fetch_model
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.hf.write import atomic_folder, describe_weights, write_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from parallel.digest import make_stored_tensors, view_rect
from parallel.formats import MODES, FormatOf
from parallel.layout import Layout
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry
from parallel.reshard import Transfer, add_scale_transfers, reshard

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def gather_tensors(
    named_tensors: dict[str, torch.Tensor], model: ModelGeometry, layout: Layout, format_of: FormatOf
) -> dict[str, torch.Tensor]:
    """Collect the checkpoint's tensors on rank 0 and return them, an empty dict elsewhere; collective. Quantised roles come as bytes and
    scales.

    `named_tensors` is this rank's `mcore.load_weights.collect_named_tensors`; what is not quantised is cast to the dtype of its format.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = build_trainer_shards(model, layout, format_of=format_of)
    checkpoint_shards = model.build_checkpoint_shards()
    own: list[tuple[Transfer, torch.Tensor]] = []
    for transfer in add_scale_transfers(reshard(sources, {0: checkpoint_shards}, format_of)):
        if transfer.source_rank == rank:
            values = view_rect(named_tensors[transfer.source], transfer.source_rect).contiguous()
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


def save_hf(
    folder: Path,
    named_tensors: dict[str, torch.Tensor],
    hf_config: dict[str, Any],
    layout: Layout,
    contract: PrecisionContract,
    tokenizer: Path,
    wide_config: dict[str, Any] | None = None,
) -> None:
    """Write a whole Hugging Face checkpoint folder from all ranks' tensors; collective, rank 0 writes.

    Quantised where the engine is (with `quantization_config`), else every tensor in `contract.high`. `wide_config`: of the wider model that
    is written, of tensors that are not quantised.
    """
    model = ModelGeometry.from_hf_config(hf_config)
    tensors = gather_tensors(named_tensors, model, layout, contract.format_of)
    if tensors and wide_config is None:
        _write(folder, hf_config, tensors, contract, tokenizer)
    elif tensors and wide_config is not None:
        wide = widen(
            lambda region: view_rect(tensors[region.tensor.name], region.tensor_rect), model, ModelGeometry.from_hf_config(wide_config)
        )
        _write(folder, wide_config, ((tensor.name, value) for tensor, value in wide), contract, tokenizer)
    dist.barrier()


def _write(folder: Path, hf_config: dict[str, Any], tensors: NamedTensors, contract: PrecisionContract, tokenizer: Path) -> None:
    with atomic_folder(folder) as temporary:
        write_checkpoint(temporary, describe_weights(hf_config, contract), tensors, tokenizer)


def export_checkpoint(checkpoint: Path, output: Path, precision: str, alignment: Alignment | None = None) -> None:
    """Run the command `export`: a run's checkpoint, or a Hugging Face one, to a Hugging Face folder in `precision`: "bf16", "fp8", "int8".

    A run's weights are quantised as its sync does; everything else keeps the run's high-precision dtype. With `alignment` the model gets
    wider matrices first (`hf.align`). For a Hugging Face folder see `convert`. Raises UserError when `checkpoint` is neither, or `output`
    exists, and where blocks that a run made would be widened.
    """
    if output.exists():
        raise UserError("--output", str(output), "exists already", "name a new folder")
    modes = {mode.engine.name: {"mode": name} for name, mode in MODES.items() if mode.engine} | {"bf16": {"mode": "bf16", "high": "bf16"}}
    if precision not in modes:
        raise UserError("--precision", precision, f"must be one of {', '.join(sorted(modes))}", "choose one")
    precision_fields: dict[str, Any] = modes[precision]
    checkpoint = fetch_model(checkpoint, "--checkpoint")
    if (checkpoint / "config.json").is_file():
        return convert(checkpoint, output, precision_fields, alignment)
    if alignment and precision != "bf16":
        raise UserError("--align", alignment.block, "widens no blocks that a run made", "use --precision bf16, and export the result again")
    from megatron_rl.mcore.checkpoint.load import load_in_one_process, read_state

    read_state(checkpoint)  # refuses what is no checkpoint
    with as_user_error():
        wide_config = align_config(read_config(checkpoint / "hf"), alignment) if alignment else None
    model, shards, saved, hf_config = load_in_one_process(checkpoint)
    from megatron_rl.mcore.load_weights import collect_named_tensors

    contract = PrecisionContract.from_config(saved.model_copy(update=precision_fields))
    save_hf(output, collect_named_tensors(model, shards, contract), hf_config, Layout(), contract, checkpoint / "hf", wide_config)


def convert(folder: Path, output: Path, precision_fields: dict[str, Any], alignment: Alignment | None = None) -> None:
    """Convert a Hugging Face checkpoint to another precision: its quantised weights to BF16, or its BF16 ones to a quantised format, FP8
    with the default scale format; with `alignment` to wider matrices as well. One tensor after the other.

    `precision_fields` are those of a `PrecisionConfig`. What a quantised result does not quantise keeps the checkpoint's dtype, BF16 or
    FP32. Raises UserError for what `HFCheckpoint` and `align_config` refuse, and where it would be quantised again.
    """
    hf_config = read_config(folder)
    source = HFCheckpoint(folder, hf_config, "--checkpoint")
    if source.format and precision_fields["mode"] != "bf16":
        rule = f"{folder} is {source.format.name.upper()} already, and blocks are not quantised twice"
        raise UserError("--precision", None, rule, "use --precision bf16")
    with as_user_error():
        model = ModelGeometry.from_hf_config(hf_config)
        wide_config = align_config(hf_config, alignment) if alignment else hf_config
    source.check(model)
    source.check_scales(model.tensors().values(), None)
    high = "fp32" if hf_config.get("torch_dtype", hf_config.get("dtype")) == "float32" else "bf16"
    contract = PrecisionContract.from_config(PrecisionConfig.model_validate({"high": high, **precision_fields}))
    wide = ModelGeometry.from_hf_config(wide_config)

    def convert_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for tensor, value in widen(source.read_values, model, wide):
            format = contract.format_of(tensor.role)
            scaled = is_scaled(model.tensors()[tensor.name], wide) or (tensor.role == "norm" and high == "bf16")  # or was, before
            if format.quantized:
                data, scale = quantize(value, format)
                yield from ((tensor.name, data), (format.scale_name(tensor.name), scale))
            else:
                yield tensor.name, value if scaled and value.dtype == torch.float32 else value.to(getattr(torch, format.dtype))

    _write(output, wide_config, convert_tensors(), contract, folder)
