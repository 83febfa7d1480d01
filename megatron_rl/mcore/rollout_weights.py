"""The quantised weights of a quantised engine: the blocks that the trainer computes with, or bytes made for this sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.distributed import raise_on_all_ranks
from megatron_rl.errors import RunError
from megatron_rl.mcore.layers.fp8_linear import reorder_rows
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import Fp8Weight, quantize_weight
from megatron_rl.precision.int8 import Int8Weight, quantize_int8_weight, row_maxima
from parallel.reshard import kind_of, scale_name
from parallel.shards import Shard


def quantize_shards(
    shards: Sequence[Shard], weights: Mapping[str, torch.Tensor], layers: Mapping[str, Any], contract: PrecisionContract
) -> dict[str, torch.Tensor]:
    """Return data and scales of every shard that the contract quantises, by name. Collective where it quantises any.

    `layers` maps a shard's name to its Megatron layer, `weights` to the parameter, which is what a layer in high precision computes
    with. In bf16 it is quantised rather than the FP32 master, which only the optimizer sees: the engine's weights then differ by the
    quantisation alone. Raises RunError, on every rank, naming a weight that holds inf or NaN.
    """
    if contract.engine_quantization is None:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    failure: RunError | None = None
    for shard in shards:  # to the end, whatever fails: other ranks may wait for this one's maxima
        kind = kind_of(shard.role, contract.fp8_roles, contract.int8_roles)
        weight, layer = weights[shard.name], layers.get(shard.name)
        try:
            if kind == "int8":
                tensors[shard.name], tensors[scale_name(shard.name, kind)] = _quantize_channels(shard, weight, layer)
            elif kind == "fp8":
                tensors[shard.name], tensors[scale_name(shard.name, kind)] = _get_blocks(weight, layer, contract.scale_format)
        except ValueError as error:
            failure = failure or RunError(f"{shard.name}: {error}; the sync is stopped before it reaches the engine")
    raise_on_all_ranks(failure)
    return tensors


def _get_blocks(weight: torch.Tensor, layer: Any, scale_format: str) -> Fp8Weight:
    blocks = getattr(layer, "blocks", None)
    return quantize_weight(reorder_rows(weight, getattr(layer, "row_order", None)), scale_format) if blocks is None else blocks


def _quantize_channels(shard: Shard, weight: torch.Tensor, layer: Any) -> Int8Weight:
    """Quantise with the scales of whole rows, also where each tensor-parallel rank holds some of their columns, so that the bytes equal
    those of the quantised checkpoint."""
    amax = row_maxima(weight)
    if any(region.tensor_rect.cols < region.tensor.cols for region in shard.regions):
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks may lose a NaN
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=layer.tp_group)
    return quantize_int8_weight(weight, amax)
