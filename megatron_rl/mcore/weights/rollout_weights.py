"""The quantised weights of a quantised engine: the blocks that the trainer computes with, or bytes made for this sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed import raise_on_all_ranks
from megatron_rl.errors import RunError
from megatron_rl.mcore.layers.linear.quantized_linear import WeightLayer, reorder_rows
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import quantize
from parallel.formats import TensorFormat
from parallel.megatron_shards import compute_row_order
from parallel.shards import Shard


def quantize_shards(
    shards: Sequence[Shard], weights: Mapping[str, torch.Tensor], layers: Mapping[str, WeightLayer], contract: PrecisionContract
) -> dict[str, torch.Tensor]:
    """Return data and scales of every shard that the contract quantises, by name. Collective where it quantises any.

    `layers` maps a shard's name to its Megatron layer, `weights` to the parameter, which is what a layer in high precision computes
    with. In bf16 it is quantised rather than the FP32 master, which only the optimizer sees: the engine's weights then differ by the
    quantisation alone. Raises RunError, on every rank, naming a weight that holds inf or NaN.
    """
    if not contract.engine_format.quantized:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    failure: RunError | None = None
    for shard in shards:  # to the end, whatever fails: other ranks may wait for this one's maxima
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
    """Whole rows share a scale also where each tensor-parallel rank holds some of their columns: the bytes are the checkpoint's."""
    if layer.blocks is not None and layer.format == format:
        return layer.blocks
    order = compute_row_order(shard, format)
    ordered = reorder_rows(weight, None if order is None else torch.tensor(order))
    return quantize_rows(ordered, format, layer.tp_group if is_cut_by_columns(shard) else None)


def is_cut_by_columns(shard: Shard) -> bool:
    """Return whether ranks of the layer's `tp_group` hold other columns of the shard's rows."""
    return any(region.tensor_rect.cols < region.tensor.cols for region in shard.regions)


def quantize_rows(rows: torch.Tensor, format: TensorFormat, group: Any) -> QuantizedWeight:
    """Quantise rows of which the ranks of `group` hold some columns each, or that are whole (None). Collective over `group`. Raise
    ValueError for inf or NaN."""

    def max_over_ranks(amax: torch.Tensor) -> torch.Tensor:
        if group is None:
            return amax
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks may lose a NaN
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    return quantize(rows, format, max_over_ranks)
