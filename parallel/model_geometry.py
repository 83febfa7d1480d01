"""The geometry of a model: every tensor of its Hugging Face checkpoint, by name, with its shape and its role.

`parallel.megatron_shards` and `parallel.sglang_shards` say which parts of them each rank holds, in the vocabulary of `parallel.shards`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parallel.hf_widths import MLAGeometry, MoEGeometry, parse_widths
from parallel.shards import HFTensor, Shard, take_all


@dataclass(frozen=True)
class ModelGeometry:
    """Widths of a decoder-only model, read from a Hugging Face config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a query head; with `latent` its parts with and without position together."""
    ffn: int
    vocab: int
    tied: bool
    """The output layer shares the embedding's weight."""
    kind: str = "qwen3"
    """`model_type` of the config.json."""
    experts: MoEGeometry | None = None
    latent: MLAGeometry | None = None

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelGeometry:
        """Read a config.json. Raise GeometryError for an architecture this project does not know, or a missing field."""
        return cls(**parse_widths(config))

    @property
    def qkv_bias(self) -> bool:
        return self.kind == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """q and k heads are normalised."""
        return self.kind in ("qwen3", "qwen3_moe")

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def tensors(self) -> dict[str, HFTensor]:
        """Return every tensor of the checkpoint by its Hugging Face name; the same dictionary at each call, not to be changed.

        DeepSeek-V3's extra layers for multi-token prediction are left out, as transformers leaves them out.
        """
        return self._tensors

    @cached_property
    def _tensors(self) -> dict[str, HFTensor]:
        tensors = [HFTensor("model.embed_tokens.weight", self.vocab, self.hidden, "embedding")]
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            tensors.append(_vector(prefix + "input_layernorm.weight", self.hidden, "norm"))
            tensors += self._attention(prefix + "self_attn.") if self.latent is None else self._latent_attention(prefix + "self_attn.")
            tensors.append(_vector(prefix + "post_attention_layernorm.weight", self.hidden, "norm"))
            tensors += self._moe(prefix + "mlp.") if self.has_experts(layer) else self._mlp(prefix + "mlp.", self.ffn)
        tensors.append(_vector("model.norm.weight", self.hidden, "norm"))
        if not self.tied:
            tensors.append(HFTensor("lm_head.weight", self.vocab, self.hidden, "lm_head"))
        return {tensor.name: tensor for tensor in tensors}

    def _attention(self, prefix: str) -> list[HFTensor]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        tensors = [HFTensor(f"{prefix}{name}.weight", size, self.hidden, "attention_qkv") for name, size in rows.items()]
        if self.qkv_bias:
            tensors += [_vector(f"{prefix}{name}.bias", size, "bias") for name, size in rows.items()]
        if self.qk_norm:
            tensors += [_vector(f"{prefix}{part}_norm.weight", self.head_dim, "norm") for part in "qk"]
        return [*tensors, HFTensor(prefix + "o_proj.weight", self.hidden, q, "attention_output")]

    def _latent_attention(self, prefix: str) -> list[HFTensor]:
        assert self.latent is not None
        mla = self.latent
        if mla.q_rank:
            tensors = [
                HFTensor(prefix + "q_a_proj.weight", mla.q_rank, self.hidden, "attention_qkv"),
                _vector(prefix + "q_a_layernorm.weight", mla.q_rank, "norm"),
                HFTensor(prefix + "q_b_proj.weight", self.heads * self.head_dim, mla.q_rank, "attention_qkv"),
            ]
        else:
            tensors = [HFTensor(prefix + "q_proj.weight", self.heads * self.head_dim, self.hidden, "attention_qkv")]
        return [
            *tensors,
            HFTensor(prefix + "kv_a_proj_with_mqa.weight", mla.kv_rank + mla.rope_dim, self.hidden, "attention_qkv"),
            _vector(prefix + "kv_a_layernorm.weight", mla.kv_rank, "norm"),
            HFTensor(prefix + "kv_b_proj.weight", self.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, "attention_qkv"),
            HFTensor(prefix + "o_proj.weight", self.hidden, self.heads * mla.v_dim, "attention_output"),
        ]

    def _mlp(self, prefix: str, ffn: int) -> list[HFTensor]:
        return [
            HFTensor(prefix + "gate_proj.weight", ffn, self.hidden, "mlp_in"),
            HFTensor(prefix + "up_proj.weight", ffn, self.hidden, "mlp_in"),
            HFTensor(prefix + "down_proj.weight", self.hidden, ffn, "mlp_out"),
        ]

    def _moe(self, prefix: str) -> list[HFTensor]:
        assert self.experts is not None
        tensors = [HFTensor(prefix + "gate.weight", self.experts.count, self.hidden, "router")]
        if self.experts.correction_bias:
            tensors.append(_vector(prefix + "gate.e_score_correction_bias", self.experts.count, "router_bias"))
        for expert in range(self.experts.count):
            tensors += self._mlp(f"{prefix}experts.{expert}.", self.experts.ffn)
        if self.experts.shared_ffn:
            tensors += self._mlp(prefix + "shared_experts.", self.experts.shared_ffn)
        return tensors

    def build_checkpoint_shards(self) -> list[Shard]:
        """Return the checkpoint itself as shards: every tensor whole."""
        return [Shard(tensor.name, tensor.rows, tensor.cols, (take_all(tensor),)) for tensor in self.tensors().values()]


def _vector(name: str, length: int, role: str) -> HFTensor:
    return HFTensor(name, length, 1, role, vector=True)
