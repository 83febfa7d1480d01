"""Gated delta nets (Qwen3-Next, Qwen3.5) as a Megatron layer: this project's linear layers around `kernels.gated_delta`.

    [q k v z] = W_qkvz x        [b a] = W_ba x        y = W_out gate_norm(delta(silu(conv([q k v])), a, b), z)

Every sequence of a packed row starts with an empty state. Megatron's own class needs CUDA, fla and Transformer Engine's layers, and
keeps the parameters of the decay in BF16. Here they are FP32; like norms, they have no weight decay.

A tensor-parallel rank holds the rows [q ; k ; v ; z] and [b ; a] of its heads, and their channels of the convolution. A context-parallel
rank exchanges its positions of all heads for all positions of some heads in front of the convolution, and the result back. The operator
works head by head, so its bits are those of one rank.

What the layer keeps for the backward pass of t tokens: the inputs of both projections (one tensor), [q k v z] and [b a] in the high
dtype, and what `kernels.gated_delta` keeps.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights
from megatron_rl.kernels.gated_delta.reference import attend, attend_gated
from megatron_rl.kernels.gates.reference import gate_norm
from megatron_rl.mcore.base.weight_gradient import take_weight
from megatron_rl.mcore.layers.linear.high_precision import PlainColumnParallelLinear
from megatron_rl.mcore.passes.context_parallel import ContextShard


@dataclass
class GatedDeltaNetParts:
    """Classes of the two quantized projections."""

    in_proj_qkvz: type
    out_proj: type


class GatedDeltaNetLayer(MegatronModule):
    """The attention of a layer whose kind is `parallel.attention.GatedDeltaNet`. Packed rows [t, 1, h] with `packed_seq_params` ->
    (y of the same shape, None); [t / tp, 1, h] under sequence parallelism, t / cp with context parallelism."""

    def __init__(self, config: TransformerConfig, submodules: GatedDeltaNetParts, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__(config)
        kind = config.attention[layer_number - 1]
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        ranks = self.tp_group.size()
        self.heads = DeltaHeads(kind.k_heads // ranks, kind.v_heads // ranks, kind.k_dim, kind.v_dim)
        options = {"config": config, "init_method": config.init_method, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        column = {**options, "gather_output": False, "skip_bias_add": False}
        self.in_proj_qkvz = submodules.in_proj_qkvz(config.hidden_size, kind.channels + kind.v_width, **column)
        self.in_proj_ba = PlainColumnParallelLinear(config.hidden_size, 2 * kind.v_heads, **column)
        self.conv1d = DepthwiseConv(kind.channels // ranks, kind.taps, config.params_dtype)
        self.A_log, self.dt_bias = (_cut_by_heads(torch.empty(self.heads.v, dtype=torch.float32)) for _ in range(2))
        self.norm = GatedNorm(kind.v_dim, config, self.tp_group)
        self.out_proj = submodules.out_proj(kind.v_width, config.hidden_size, **options, input_is_parallel=True, skip_bias_add=True)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any) -> Any:
        qkvz, ba = (projection(hidden_states)[0].squeeze(1) for projection in (self.in_proj_qkvz, self.in_proj_ba))
        b, a = ba.split(self.heads.v, -1)
        normed = self._attend(qkvz, a, b, packed_seq_params.lengths, packed_seq_params.shard)
        return self.out_proj(normed.flatten(1).unsqueeze(1))

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Widths of q, k, v and z on this rank."""
        return *self.heads.widths, self.heads.widths[-1]

    def _attend(self, qkvz: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: list[int], shard: ContextShard | None) -> torch.Tensor:
        """Return the gated norm of the rule's output [t, v heads, v_dim]. A context-parallel rank passes and receives its own positions."""
        conv, a_log, dt_bias = (take_weight(weight) for weight in (self.conv1d.weight, self.A_log, self.dt_bias))
        if shard is None or shard.size == 1:
            norm = self.norm.take_weight(), self.norm.eps
            return attend_gated(DeltaWeights(conv, a_log, dt_bias, self.heads), norm, qkvz, a, b, lengths)
        *qkv, z = qkvz.split(list(self.widths), -1)
        size, rank = shard.size, shard.group.rank()
        parts = [part.unflatten(1, (size, -1)) for part in (*qkv, a, b)]  # equal ranges of heads, one for each rank
        (received,) = shard.to_heads(torch.cat(parts, -1).flatten(1))
        mixed, a, b = received.split([sum(part.shape[-1] for part in parts[:3]), a.shape[1] // size, b.shape[1] // size], -1)
        channels = torch.cat([rows.chunk(size)[rank] for rows in conv.split(list(self.widths[:3]))])
        heads = self.heads._replace(k=self.heads.k // size, v=self.heads.v // size)
        weights = DeltaWeights(channels, a_log.chunk(size)[rank], dt_bias.chunk(size)[rank], heads)
        out = shard.to_positions(attend(weights, mixed, a, b, lengths))
        return gate_norm(out, z.unflatten(-1, (self.heads.v, -1)), self.norm.take_weight(), self.norm.eps)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None) -> Any:
        replicas, state = (metadata or {}).get("dp_cp_group"), self.state_dict(keep_vars=True)
        own = {name: state[name] for name in ("A_log", "dt_bias", "conv1d.weight", "norm.weight")}
        axes = {name: 0 for name in own if name != "norm.weight"}
        sharded = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=replicas)
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            sharded |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        for name in ("in_proj_qkvz", "in_proj_ba", "conv1d"):
            sharded[f"{prefix}{name}.weight"] = self.place_rows(name, sharded[f"{prefix}{name}.weight"], sharded_offsets)
        return sharded

    def place_rows(self, name: str, sharded: ShardedTensor, offsets: Any = ()) -> ShardedTensorFactory:
        """Return the rows of a stacked layer, of its weight or its lora_B, at their places in the layer of one rank, [q ; k ; v ; z]: any
        number of ranks can load them."""
        sections = {"in_proj_qkvz": [*self.widths], "in_proj_ba": [self.heads.v] * 2, "conv1d": [*self.heads.widths]}[name]
        ranks, rank, axis, rows = self.tp_group.size(), self.tp_group.rank(), len(offsets), math.gcd(*sections)  # a grid needs equal parts
        starts = [ranks * before + rank * size for before, size in zip(accumulate(sections, initial=0), sections, strict=False)]
        places = [row // rows for start, size in zip(starts, sections, strict=True) for row in range(start, start + size, rows)]

        def build(key: str, tensor: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
            grid = [(axis, place, ranks * sum(sections) // rows) for place in places]
            return [
                ShardedTensor.from_rank_offsets(key, part, *offsets, cell, replica_id=replica, prepend_axis_num=axis)
                for part, cell in zip(tensor.split(rows), grid, strict=True)
            ]

        return ShardedTensorFactory(sharded.key, sharded.data, build, torch.cat, sharded.replica_id)


class DepthwiseConv(torch.nn.Module):
    """The weight [channels, taps] of a rank's causal convolution. `GatedDeltaNetLayer` computes it."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _cut_by_heads(torch.empty(channels, taps, dtype=dtype))


class GatedNorm(torch.nn.Module):
    """The weight [v_dim] of RMSNorm of each head's output, times SiLU of its gate. All heads share it, so its gradient is summed over the
    tensor-parallel ranks, in FP32. `GatedDeltaNetLayer` computes it."""

    def __init__(self, width: int, config: TransformerConfig, tp_group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, dtype=config.params_dtype))
        self.eps, self.tp_group = config.layernorm_epsilon, tp_group

    def take_weight(self) -> torch.Tensor:
        """Return the weight with gradient."""
        weight: torch.Tensor = take_weight(self.weight)
        if self.tp_group.size() > 1:
            weight = copy_to_tensor_model_parallel_region(weight.float(), group=self.tp_group)
        return weight


def _cut_by_heads(values: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter of which tensor-parallel ranks hold equal parts, for Megatron's gradient norm."""
    parameter = torch.nn.Parameter(values)
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter
