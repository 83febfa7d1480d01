"""The INT8 weights that a trainer in high precision gives to its engine (`int8_rollout`): made at every sync, kept nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.errors import RunError
from megatron_rl.int8 import Channels, quantize_channels, row_maxima
from megatron_rl.ranks import raise_together
from parallel.geometry import Shard
from parallel.plan import scale_name


def int8_planes(shards: Sequence[Shard], weights: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Data int8 [N, K] and scales float32 [N, 1] of every shard, by name. Collective where there are any.

    A channel's scale is that of its whole row, also where tensor-parallel ranks hold a part of its columns each, so the bytes are
    those of quantising the checkpoint's tensor. `layers` maps a shard's name to its Megatron layer, `weights` to what the layer
    computes with. Raises RunError, on every rank, naming a weight that holds inf or NaN.
    """
    if not shards:
        return {}
    found: dict[str, torch.Tensor] = {}
    broken: RunError | None = None
    for shard in shards:  # to the end, whatever breaks: other ranks wait for this one's maxima
        try:
            found[shard.name], found[scale_name(shard.name, "int8")] = _channels(shard, weights[shard.name], layers[shard.name])
        except ValueError as error:
            broken = broken or RunError(f"{shard.name}: {error}; the sync is stopped before it reaches the engine")
    raise_together(broken)
    return found


def _channels(shard: Shard, weight: torch.Tensor, layer: Any) -> Channels:
    amax = row_maxima(weight)
    if any(piece.source.cols < piece.tensor.cols for piece in shard.pieces):
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over ranks may lose a NaN
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=layer.tp_group)
    return quantize_channels(weight, amax)
