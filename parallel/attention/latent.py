"""Multi-latent attention (MLA) of DeepSeek-V2 (arXiv 2405.04434): queries, keys and values through low-rank projections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parallel.attention.base import AttentionKind
from parallel.hf_config import Rope
from parallel.shards import HFTensor, Weight, make_vector, make_weight

if TYPE_CHECKING:
    from parallel.formats import TensorFormat

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms of latent vectors, whatever `rms_norm_eps` says, as in DeepSeek's code and in transformers."""


@dataclass(frozen=True)
class Indexer:
    """What selects the `topk` tokens to which sparse attention attends (DeepSeek-V3.2, arXiv 2512.02556). Of a sequence of at most so many
    tokens, it selects all, so attention is dense, and the indexer's result and gradient do not matter: no one computes it."""

    heads: int
    dim: int
    topk: int
    sharing: frozenset[int] = frozenset()  # layers without an indexer, which attend to what the last one selected (arXiv 2603.12201)

    def list_tensors(self, hidden: int, q_rank: int, hf: str) -> list[HFTensor]:
        """Return its weights. Published FP8 checkpoints quantize both projections."""
        return [
            HFTensor(hf + "wq_b.weight", self.heads * self.dim, q_rank, "attention_qkv"),
            HFTensor(hf + "wk.weight", self.dim, hidden, "attention_qkv"),
            HFTensor(hf + "k_norm.weight", self.dim, 1, "norm", vector=True),
            HFTensor(hf + "k_norm.bias", self.dim, 1, "bias", vector=True),
            HFTensor(hf + "weights_proj.weight", self.heads, hidden, "indexer_gate"),
        ]


@dataclass(frozen=True)
class LatentAttention(AttentionKind):
    heads: int
    q_rank: int  # rank of the query projection (`q_lora_rank`); 0 means queries are projected directly
    kv_rank: int
    nope_dim: int  # width of the part of a query or key head without rotary position
    rope_dim: int  # width of the part with rotary position; all key heads share it
    v_dim: int
    rope: Rope = field(default_factory=Rope)
    indexer: Indexer | None = None  # of sparse attention

    @property
    def can_widen(self) -> bool:
        return self.indexer is None

    @property
    def most_tokens(self) -> int | None:
        return self.indexer.topk if self.indexer else None

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def output(self) -> tuple[str, int]:
        return "o_proj", self.heads * self.v_dim

    @property
    def rotated(self) -> tuple[str, float]:
        return "qk_rope_head_dim", self.rope_dim * self.rope.share

    @property
    def flops_per_position(self) -> int:
        return self.heads * (self.head_dim + self.v_dim)

    @property
    def head_counts(self) -> dict[str, int]:
        return {"num_attention_heads": self.heads}

    @property
    def moved_heads(self) -> int:
        return 4 * self.heads * self.head_dim

    @property
    def adapted(self) -> tuple[str, ...]:
        return ("linear_proj",)

    def refuse_engine_format(self, format: TensorFormat) -> str:
        if format.serves_latent_attention:
            return ""
        return f"latent attention (MLA), because SGLang absorbs an {format.name.upper()} kv_b_proj with values and scales in BF16"

    def refuse_kv_scales_by_layer(self) -> str:
        return "latent attention (MLA): its cache has no keys and values, and SGLang's E4M3 kernels round queries"

    def count_cache_bytes(self, tp: int, bytes_of: Callable[[int], int]) -> int:
        return bytes_of(self.kv_rank) + bytes_of(self.rope_dim)  # every rank keeps one latent for all heads

    def list_kept(self, layer: int, hidden: int, hf: str) -> list[HFTensor]:
        if self.indexer is None or layer in self.indexer.sharing:
            return []
        return self.indexer.list_tensors(hidden, self.q_rank, hf + "indexer.")

    def list_weights(self, hidden: int, hf: str, megatron: str, kv_scales: bool = False) -> list[Weight]:
        """If there are two down projections, SGLang keeps them as one parameter."""
        q_width, down = self.heads * self.head_dim, ""
        if self.q_rank:
            down = hf + "fused_qkv_a_proj_with_mqa.weight"
            q_a = HFTensor(hf + "q_a_proj.weight", self.q_rank, hidden, "attention_qkv")
            q_b = HFTensor(hf + "q_b_proj.weight", q_width, self.q_rank, "attention_qkv")
            queries = [
                make_weight(q_a, megatron + "linear_q_down_proj.weight", "whole", down),
                make_vector(hf + "q_a_layernorm.weight", self.q_rank, megatron + "q_layernorm.weight"),
                make_weight(q_b, megatron + "linear_q_up_proj.weight", "rows"),
            ]
        else:
            q = HFTensor(hf + "q_proj.weight", q_width, hidden, "attention_qkv")
            queries = [make_weight(q, megatron + "linear_q_proj.weight", "rows")]
        kv_a = HFTensor(hf + "kv_a_proj_with_mqa.weight", self.kv_rank + self.rope_dim, hidden, "attention_qkv")
        kv_b = HFTensor(hf + "kv_b_proj.weight", self.heads * (self.nope_dim + self.v_dim), self.kv_rank, "attention_qkv")
        output = HFTensor(hf + "o_proj.weight", hidden, self.heads * self.v_dim, "attention_output")
        return [
            *queries,
            make_weight(kv_a, megatron + "linear_kv_down_proj.weight", "whole", down),
            make_vector(hf + "kv_a_layernorm.weight", self.kv_rank, megatron + "kv_layernorm.weight"),
            make_weight(kv_b, megatron + "linear_kv_up_proj.weight", "rows"),
            make_weight(output, megatron + "linear_proj.weight", "cols"),
        ]
