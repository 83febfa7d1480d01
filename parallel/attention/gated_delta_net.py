"""Gated delta nets (arXiv 2412.06464), the linear attention of Qwen3-Next and Qwen3.5: a causal convolution of q, k and v, and a state
[k_dim, v_dim] for each value head, which decays and is corrected with every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from parallel.attention.base import AttentionKind
from parallel.shards import HFTensor, Region, Weight, make_vector, make_weight, take_all, take_rows

if TYPE_CHECKING:
    from parallel.formats import TensorFormat

SPAN = 64
"""Tokens between two states that a forward pass keeps for the backward pass."""


@dataclass(frozen=True)
class GatedDeltaNet(AttentionKind):
    k_heads: int
    v_heads: int  # a multiple of `k_heads`: value heads share the query and the key of their key head
    k_dim: int
    v_dim: int
    taps: int  # tokens that the convolution sees
    grouped: bool = False
    """Whether the checkpoint has one tensor of q, k, v and z (the gate of the output), and one of b and a, whose rows are grouped by key
    head (Qwen3-Next). SGLang has the checkpoint's order, and Megatron [q ; k ; v ; z] and [b ; a] of the rank's heads."""

    module: ClassVar[str] = "linear_attn"
    has_cache_by_position: ClassVar[bool] = False
    can_widen: ClassVar[bool] = False
    unquantized_modules: ClassVar[tuple[str, ...]] = ("in_proj_ba", "in_proj_b", "in_proj_a", "conv1d")

    @property
    def k_width(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def v_width(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.k_width + self.v_width

    @property
    def output(self) -> tuple[str, int]:
        return "out_proj", self.v_width

    @property
    def flops_per_token(self) -> int:
        """Decay, S^T k, the outer product and S^T q take 7 FLOPs for each element of a state; a tap of the convolution takes 2."""
        return 7 * self.v_width * self.k_dim + 2 * self.taps * self.channels

    @property
    def head_counts(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.k_heads, "linear_num_value_heads": self.v_heads}

    @property
    def adapted(self) -> tuple[str, ...]:
        return ("in_proj_qkvz", "out_proj")

    @property
    def moved_heads(self) -> int:
        return self.channels + 2 * self.v_heads + self.v_width

    def refuse_engine_format(self, format: TensorFormat) -> str:
        fits = format.names_modules or not format.quantized
        return "" if fits else f"gated delta nets, whose gates SGLang would store in {format.name.upper()}"

    def count_state_bytes(self, tp: int, high_bytes: int) -> int:
        """Return the bytes of the float32 states, and of the last inputs of the convolution in the high dtype."""
        return (4 * self.v_width * self.k_dim + (self.taps - 1) * self.channels * high_bytes) // tp

    def list_weights(self, hidden: int, hf: str, megatron: str, kv_scales: bool = False) -> list[Weight]:
        def decay(name: str) -> Weight:
            return make_weight(HFTensor(hf + name, self.v_heads, 1, "delta_decay", vector=True), megatron + name, "rows")

        conv = HFTensor(hf + "conv1d.weight", self.channels, self.taps, "delta_conv")
        output = HFTensor(hf + "out_proj.weight", hidden, self.v_width, "attention_output")
        return [
            *(self._list_grouped(hidden, hf, megatron) if self.grouped else self._list_split(hidden, hf, megatron)),
            Weight(tuple(self._split_qkv(conv)), megatron + "conv1d.weight", conv.name, "rows"),
            decay("A_log"),
            decay("dt_bias"),
            make_vector(hf + "norm.weight", self.v_dim, megatron + "norm.weight"),
            make_weight(output, megatron + "out_proj.weight", "cols"),
        ]

    def _split_qkv(self, tensor: HFTensor) -> list[Region]:
        k, v = self.k_width, self.v_width
        return [take_rows(tensor, 0, k), take_rows(tensor, k, k), take_rows(tensor, 2 * k, v)]

    def _list_split(self, hidden: int, hf: str, megatron: str) -> list[Weight]:
        def tensor(name: str, rows: int, role: str) -> HFTensor:
            return HFTensor(f"{hf}in_proj_{name}.weight", rows, hidden, role)

        qkv, z = tensor("qkv", self.channels, "attention_qkv"), tensor("z", self.v_width, "attention_qkv")
        gates = [tensor(name, self.v_heads, "delta_gates") for name in "ba"]
        qkvz = (*self._split_qkv(qkv), take_all(z))
        return [
            Weight(qkvz, megatron + "in_proj_qkvz.weight", hf + "in_proj_qkvz.weight", "rows"),
            make_weight(gates, megatron + "in_proj_ba.weight", "rows", hf + "in_proj_ba.weight"),
        ]

    def _list_grouped(self, hidden: int, hf: str, megatron: str) -> list[Weight]:
        ratio = self.v_heads // self.k_heads
        parts = {"qkvz": (self.k_dim, self.k_dim, ratio * self.v_dim, ratio * self.v_dim), "ba": (ratio, ratio)}  # rows of a key head
        weights = []
        for (name, sizes), role in zip(parts.items(), ("attention_qkv", "delta_gates"), strict=True):
            tensor = HFTensor(f"{hf}in_proj_{name}.weight", self.k_heads * sum(sizes), hidden, role)
            starts = range(0, tensor.rows, sum(sizes))
            stacks = (tuple(take_rows(tensor, at + sum(sizes[:part]), size) for at in starts) for part, size in enumerate(sizes))
            weights.append(make_weight(tensor, f"{megatron}in_proj_{name}.weight", "rows")._replace(stacks=tuple(stacks)))
        return weights
