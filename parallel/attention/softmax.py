"""Grouped-query attention with a softmax, optionally with biases, norms of q and k heads, and a gate of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from parallel.attention.base import AttentionKind
from parallel.hf_config import HFConfig, Rope
from parallel.shards import GeometryError, HFTensor, Region, Weight, make_vector, make_weight, take_rows


@dataclass(frozen=True)
class SoftmaxAttention(AttentionKind):
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    qk_norm: bool = False  # whether q and k heads are normalized
    over_all_heads: bool = False  # with `qk_norm`, whether all heads of a token have one norm
    gated: bool = False
    """Whether sigmoids of a second half of each head's query projection multiply the head's result. SGLang's layers of such models own the
    projections, without a module for the attention."""
    rope: Rope | None = field(default_factory=Rope)  # None: the layer has no positions

    @property
    def can_widen(self) -> bool:
        return not self.over_all_heads

    @property
    def output(self) -> tuple[str, int]:
        return "o_proj", self.heads * self.head_dim

    @property
    def rotated(self) -> tuple[str, float]:
        return "head_dim", self.head_dim * self.rope.share if self.rope else 0

    @property
    def flops_per_position(self) -> int:
        return 2 * self.heads * self.head_dim

    @property
    def head_counts(self) -> dict[str, int]:
        return {"num_attention_heads": self.heads}

    @property
    def moved_heads(self) -> int:
        return 2 * (self.heads + self.kv_heads) * self.head_dim

    def check_ranks(self, tp: int, field: str) -> None:
        super().check_ranks(tp, field)
        if max(self.kv_heads, tp) % min(self.kv_heads, tp):
            rule = f"must divide num_key_value_heads ({self.kv_heads}) or be a multiple of it"
            raise GeometryError(field, tp, rule, f"use a divisor of {self.kv_heads}")

    def count_cache_bytes(self, tp: int, bytes_of: Callable[[int], int]) -> int:
        return 2 * max(1, self.kv_heads // tp) * bytes_of(self.head_dim)

    def list_weights(self, hidden: int, hf: str, megatron: str, kv_scales: bool = False) -> list[Weight]:
        engine = hf.removesuffix("self_attn.") if self.gated else hf
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q": (1 + self.gated) * q, "k": kv, "v": kv}

        def stack(kind: str, cols: int, role: str) -> Weight:
            parts = [HFTensor(f"{hf}{part}_proj.{kind}", size, cols, role, vector=kind == "bias") for part, size in rows.items()]
            weight = make_weight(parts, f"{megatron}linear_qkv.{kind}", "qkv", f"{engine}qkv_proj.{kind}")
            return weight._replace(stacks=(self.list_groups(*weight.pieces),), kv_heads=self.kv_heads)

        weights = [stack("weight", hidden, "attention_qkv")]
        if self.qkv_bias:
            weights.append(stack("bias", 1, "bias"))
        if self.qk_norm:
            for part, heads in (("q", self.heads), ("k", self.kv_heads)):
                name, width = f"{part}_norm.weight", self.head_dim * (heads if self.over_all_heads else 1)
                weight = make_vector(hf + name, width, f"{megatron}{part}_layernorm.weight", sglang=engine + name)
                weights.append(weight._replace(cut="heads", kv_heads=heads) if self.over_all_heads else weight)
        if kv_scales:
            name = "attn.kv_scales"
            weights.append(make_vector(hf + name, 2, megatron + "core_attention.kv_scales", "kv_scales", engine + name))
        output = HFTensor(hf + "o_proj.weight", hidden, q, "attention_output")
        return [*weights, make_weight(output, megatron + "linear_proj.weight", "cols", engine + "o_proj.weight")]

    def list_groups(self, q: Region, k: Region, v: Region) -> tuple[Region, ...]:
        """Return Megatron's rows: for each key head its query heads, their gates, the key head and the value head."""
        size, per_group, regions = self.head_dim, self.heads // self.kv_heads, list[Region]()

        def take(whole: Region, first: int, count: int) -> Region:
            return take_rows(whole.tensor, whole.tensor_rect.row + first * size, count * size)

        for group in range(self.kv_heads):
            heads = range(group * per_group, (group + 1) * per_group)
            if self.gated:  # the checkpoint has each head's gate after its query
                regions += [take(q, 2 * head + half, 1) for half in (0, 1) for head in heads]
            else:
                regions.append(take(q, heads.start, per_group))
            regions += [take(k, group, 1), take(v, group, 1)]
        return tuple(regions)


def read_softmax(config: HFConfig, head_dim: int, rope: Rope, **options: bool) -> tuple[SoftmaxAttention, ...]:
    """Return grouped-query attention for every layer of a config.json. Raise GeometryError for unequal groups or other layers."""
    return config.in_every_layer(SoftmaxAttention(*config.head_counts(), head_dim, rope=rope, **options))
