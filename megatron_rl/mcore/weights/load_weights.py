"""Weights of a Megatron model in Hugging Face terms: loads a checkpoint into this rank's shards, and collects the tensors of a sync.

The geometry comes from `parallel`; quantized tensors are the blocks that the trainer computes with, or are quantized for the sync.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed import errors_on_all_ranks, is_rank0, raise_on_all_ranks
from megatron_rl.errors import RunError, as_user_error
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.base.names import ModelChunks, get_model_chunks, global_name, iter_modules
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear, WeightLayer, reorder_rows
from megatron_rl.mcore.optim.buckets import finish_gathers
from megatron_rl.mcore.weights.cache_scales import collect_scales
from megatron_rl.mcore.weights.master_spread import MasterSpread
from megatron_rl.precision.contract import QUANTIZED_ROLES, PrecisionContract
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize, quantize
from parallel.digest import make_stored_tensors, view_rect
from parallel.formats import TensorFormat
from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards, compute_row_order, reorder_for_quantization
from parallel.model_geometry import ModelGeometry, as_critic
from parallel.mtp_layers import MEGATRON_PREFIX
from parallel.reshard import check_block_alignment, get_scale_rect
from parallel.shards import Shard


def build_rank_shards(hf_config: dict[str, Any], layout: Layout, rank: int | None = None) -> list[Shard]:
    """Return the shards of a rank (by default this process) of `layout`. Raise UserError if model and layout do not fit."""
    rank = torch.distributed.get_rank() if rank is None else rank
    with as_user_error():
        return build_megatron_shards(ModelGeometry.from_hf_config(hf_config), layout, layout.coordinates(rank))


def load_checkpoint(
    model: ModelChunks, folder: Path, shards: list[Shard], spread: MasterSpread | None = None, critic: bool = False
) -> None:
    """Fill this rank's parameters from a Hugging Face checkpoint, cast to their dtypes. Collective. `spread` draws the masters from the
    values that round to the checkpoint's; all blocks stay the same. Raise UserError on every rank if `HFCheckpoint` refuses the checkpoint.

    Quantized layers adopt the blocks of a checkpoint in their format byte for byte, and the optimizer starts from their values. All other
    layers start from the dequantized values. In mode `fp8_rollout`, the engine then gets the blocks of those values. With pow2 scales these
    have the same values as the checkpoint's blocks (a block whose maximum is at most 224 gets half the scale); with fp32 scales or
    `high = "bf16"`, values may change by one rounding."""
    with errors_on_all_ranks():
        hf_config = as_critic(read_config(folder)) if critic else read_config(folder)
        checkpoint = HFCheckpoint(folder, hf_config, "critic.path" if critic else "model.path")
        if is_rank0():  # opens all files; other ranks open only the files they need
            checkpoint.check(ModelGeometry.from_hf_config(hf_config))
    with errors_on_all_ranks():
        _load(model, checkpoint, shards, spread)


@torch.no_grad()
def _load(model: ModelChunks, checkpoint: HFCheckpoint, shards: list[Shard], spread: MasterSpread | None) -> None:
    parameters = global_parameters(model)
    held = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    planned = {shard.name: shard.shape for shard in shards}
    for name in sorted(held.keys() | planned.keys()):
        if held.get(name) != planned.get(name):
            raise AssertionError(f"{name} is {held.get(name, 'absent')} in Megatron, {planned.get(name, 'absent')} in the model's geometry")
    layers = find_weight_layers(model)
    for shard in shards:
        layer, tensors = layers.get(shard.name), [region.tensor for region in shard.regions]
        checkpoint.check_scales(tensors, layer.format if layer else None)
        stored = checkpoint.find_format(tensors[0])
        spreads = spread if spread and stored is None and spread.contract.spreads_parameter(shard.role) else None
        if not isinstance(layer, QuantizedLinear):
            _read_values(checkpoint, shard, parameters[shard.name], spreads)
        elif stored is not None and stored.name == layer.format.name:
            ordered = reorder_for_quantization(shard, layer.format)
            layer.adopt(_read_shard_blocks(checkpoint, ordered, layer.format), partial(_draw_for_blocks, layer, ordered, spread))
        else:
            layer.quantize(_read_master(checkpoint, shard, layer))  # masters drawn by `spread` have the same blocks
            layer.start_master(partial(_read_master, checkpoint, shard, layer, spreads))


def _read_master(checkpoint: HFCheckpoint, shard: Shard, layer: QuantizedLinear, spread: MasterSpread | None = None) -> torch.Tensor:
    """Return a shard's values, or the masters that `spread` draws for them, float32 [N, K]."""
    return _read_values(checkpoint, shard, torch.zeros(shard.shape, device=layer.weight.device), spread)


def _read_values(checkpoint: HFCheckpoint, shard: Shard, into: torch.Tensor, spread: MasterSpread | None) -> torch.Tensor:
    """Fill `into` [N, K] with a shard's values, or with the masters that `spread` draws for them, and return it."""
    read = partial(spread.read, checkpoint) if spread else checkpoint.read_into
    for region in shard.regions:
        read(region, view_rect(into, region.shard_rect))
    return into


def _draw_for_blocks(layer: QuantizedLinear, ordered: Shard, spread: MasterSpread | None) -> torch.Tensor:
    """Return masters float32 [N, K] for a layer's adopted blocks: their values, or the masters that `spread` draws."""
    masters = spread.draw_for_blocks(ordered, layer.blocks, layer.format) if spread else dequantize(layer.blocks, layer.format)
    return masters if layer.row_order is None else torch.empty_like(masters).index_copy_(0, layer.row_order.to(masters.device), masters)


def _read_shard_blocks(checkpoint: HFCheckpoint, shard: Shard, format: TensorFormat) -> QuantizedWeight:
    """Read the blocks of a shard, in quantized order, from the checkpoint."""
    with as_user_error():
        check_block_alignment({0: [shard]}, lambda _: format)
    tensors = make_stored_tensors([shard], lambda _: format)
    blocks = QuantizedWeight(tensors[shard.name], tensors[format.scale_name(shard.name)])
    for region in shard.regions:
        data, scale = checkpoint.read_blocks(region)
        view_rect(blocks.data, region.shard_rect).copy_(data)
        view_rect(blocks.scale, get_scale_rect(region.shard_rect, format)).copy_(scale)
    return blocks


def global_parameters(model: ModelChunks) -> dict[str, torch.Tensor]:
    """Return this rank's parameters by global name, including the correction biases of routers, which are buffers in Megatron."""
    return {
        global_name(chunk, name): tensor
        for chunk in get_model_chunks(model)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        if isinstance(tensor, torch.nn.Parameter) or name.endswith(".router.expert_bias")
    }


def set_formats(model: ModelChunks, geometry: ModelGeometry, layout: Layout, contract: PrecisionContract) -> None:
    """Make every layer with a weight a `WeightLayer`: set formats, blocks and row orders."""
    shards = build_megatron_shards(geometry, layout, layout.coordinates(torch.distributed.get_rank()))
    orders = {shard.name: compute_row_order(shard, contract.format_of(shard.role)) for shard in shards}
    linear = {shard.name: shard for shard in shards if shard.role in QUANTIZED_ROLES}
    for name, layer in find_weight_layers(model).items():
        if not isinstance(layer, QuantizedLinear):
            layer.format, layer.blocks = contract.high_format, None  # type: ignore[misc]
        layer.engine_format = contract.engine_format if name in linear and not name.startswith(MEGATRON_PREFIX) else None
        layer.is_cut_by_columns = name in linear and is_cut_by_columns(linear[name])
        order = orders.get(name)
        layer.row_order = None if order is None else torch.tensor(order)


def find_weight_layers(model: ModelChunks) -> dict[str, WeightLayer]:
    """Return {global name of a weight: its layer}."""
    modules = iter_modules(model)
    return {global_name(chunk, f"{name}.weight"): module for chunk, name, module in modules if hasattr(module, "weight")}


def collect_named_tensors(model: ModelChunks, shards: list[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank contributes to a sync or an export, by global name: raw values, bytes and scales of quantized
    roles, and KV-cache scales, as views of live memory if possible. Call it again after every optimizer step. Collective.

    A quantized layer yields the blocks that it computes with, or its master if the contract does not quantize it. If only the engine is
    quantized, `quantize_shards` makes the bytes. Rows are in the quantized order of `parallel.megatron_shards`."""
    finish_gathers(model)
    weights, layers = {name: tensor.detach() for name, tensor in global_parameters(model).items()}, find_weight_layers(model)
    for shard in shards:
        layer = layers.get(shard.name)
        if isinstance(layer, QuantizedLinear) and not contract.format_of(shard.role).quantized:
            weights[shard.name] = layer.gather_master()
    return weights | collect_scales(model) | quantize_shards(shards, weights, layers, contract)


def quantize_shards(
    shards: Sequence[Shard], weights: Mapping[str, torch.Tensor], layers: Mapping[str, WeightLayer], contract: PrecisionContract
) -> dict[str, torch.Tensor]:
    """Return data and scales of every shard that the contract quantizes, by name. Collective if there is any. `weights` holds the
    parameters by shard name, `layers` their layers. A BF16 parameter is quantized rather than its FP32 master, so the engine's weights
    differ from the trainer's by the quantization alone. Raise RunError on every rank if a weight holds inf or NaN."""
    if not contract.engine_format.quantized:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    failure: RunError | None = None
    for shard in shards:  # complete the loop even after an error: other ranks may wait for this rank's maxima
        format = contract.format_of(shard.role)
        if format.quantized:
            try:
                blocks = _get_blocks(shard, weights[shard.name], layers[shard.name], format)
                tensors[shard.name], tensors[format.scale_name(shard.name)] = blocks
            except ValueError as error:
                failure = failure or RunError(f"{shard.name}: {error}; the sync is stopped before it reaches the engine")
    raise_on_all_ranks(failure)
    return tensors


def _get_blocks(shard: Shard, weight: torch.Tensor, layer: WeightLayer, format: TensorFormat) -> QuantizedWeight:
    """Return the layer's blocks, or quantize its weight."""
    if layer.blocks is not None and layer.format == format:
        return layer.blocks
    order = compute_row_order(shard, format)
    ordered = reorder_rows(weight, None if order is None else torch.tensor(order))
    return quantize_rows(ordered, format, layer.tp_group if is_cut_by_columns(shard) else None)


def is_cut_by_columns(shard: Shard) -> bool:
    """Return whether ranks of the layer's `tp_group` hold different columns of the shard's rows."""
    return any(region.tensor_rect.cols < region.tensor.cols for region in shard.regions)


def quantize_rows(rows: torch.Tensor, format: TensorFormat, group: Any) -> QuantizedWeight:
    """Quantize rows. The ranks of `group` hold different columns of them; None means that the rows are whole. Collective over `group`.
    Scales of whole rows are agreed on, so the bytes are those of the checkpoint. Raise ValueError for inf or NaN."""

    def max_over_ranks(amax: torch.Tensor) -> torch.Tensor:
        if group is None:
            return amax
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # MAX over ranks may lose a NaN
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    return quantize(rows, format, max_over_ranks)
