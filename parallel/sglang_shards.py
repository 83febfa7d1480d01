"""How SGLang 0.5.23 cuts a model: each engine rank's parameters as regions of the checkpoint. Knows names and shapes, imports no SGLang.

qkv_proj is [q ; k ; v] of the rank's heads (a kv head is replicated when there are more ranks than kv heads), gate_up_proj is
[gate ; up]. Experts lie in two tensors, w13_weight [E, 2I, H] = [gate ; up] each and w2_weight [E, H, I], here with their E matrices
one below the other. With expert parallelism, rank r of tp holds the r // (tp / ep)-th group of experts, split tensor-parallel by the rest.
The vocabulary is padded to a multiple of 64: the padding is no region of the checkpoint and is never written.

MLA: q_a and kv_a are one replicated tensor, fused_qkv_a_proj_with_mqa. SGLang also keeps w_kc and w_vc, made from kv_b_proj by the
model's post_load_weights, which runs again when SGLang's weight update ends. DeepSeek's shared experts are modules of their
own: run the engine with --disable-shared-experts-fusion, and no all-to-all backend that replicates them.
"""

from __future__ import annotations

from functools import lru_cache

from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError, HFTensor, Region, Shard, ShardBuilder, split_cols, split_rows, stack_regions, take_all

_VOCAB_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE of vocab_parallel_embedding.py
_FIELD = "rollout.tp"


def padded_vocabulary(vocab: int, tp: int) -> int:
    """Return the rows of SGLang's embedding over all ranks."""
    padded = -(-vocab // _VOCAB_PADDING) * _VOCAB_PADDING
    return padded if padded % tp == 0 else -(-vocab // (_VOCAB_PADDING * tp)) * _VOCAB_PADDING * tp


def build_sglang_shards(model: ModelGeometry, tp: int, rank: int, ep: int = 1) -> list[Shard]:
    """Return all parameters of rank `rank` of an engine of `tp` ranks, `ep` of them expert parallel, by SGLang's parameter names.

    Raises GeometryError where the sizes do not fit the model.
    """
    _check_sizes(model, tp, ep)
    return list(_shards(model, tp, rank, ep))


def build_engine_shards(model: ModelGeometry, tp: int, ep: int = 1, engines: int = 1) -> dict[int, list[Shard]]:
    """Return `build_sglang_shards` of every rank of several equal engines; rank r of engine e has number e * tp + r."""
    return {rank: build_sglang_shards(model, tp, rank % tp, ep) for rank in range(engines * tp)}


def _check_sizes(model: ModelGeometry, tp: int, ep: int) -> None:
    if model.heads % tp:
        raise GeometryError(_FIELD, tp, f"must divide num_attention_heads ({model.heads})", f"use a divisor of {model.heads}")
    if model.latent is None and max(model.kv_heads, tp) % min(model.kv_heads, tp):
        raise GeometryError(_FIELD, tp, f"must divide num_key_value_heads ({model.kv_heads}) or be a multiple of it", "use a power of two")
    if tp % ep:
        raise GeometryError("rollout.ep", ep, f"must divide rollout.tp ({tp})", f"use a divisor of {tp}")
    if model.kind == "qwen3_moe" and model.experts is not None and model.experts.dense_layers:
        raise GeometryError(
            "mlp_only_layers",
            sorted(model.experts.dense_layers),
            "SGLang gives every layer of a qwen3_moe model experts, and would serve these with weights that nobody wrote",
            "use a model without dense layers",
        )
    if model.experts is None and ep > 1:
        raise GeometryError("rollout.ep", ep, f"needs a model with experts, {model.kind} has none", "set rollout.ep = 1")
    if model.experts is not None and model.experts.count % ep:
        raise GeometryError("rollout.ep", ep, f"must divide the number of experts ({model.experts.count})", "use a divisor of it")


@lru_cache(maxsize=1024)
def _shards(model: ModelGeometry, tp: int, rank: int, ep: int) -> tuple[Shard, ...]:
    return tuple(_SGLangShardBuilder(model, tp, rank, ep).build())


class _SGLangShardBuilder(ShardBuilder):
    """Builds the shards of one rank."""

    def __init__(self, model: ModelGeometry, tp: int, rank: int, ep: int) -> None:
        super().__init__(model.tensors(), rank, tp, _FIELD)
        self.model, self.tp, self.rank, self.ep = model, tp, rank, ep

    def build(self) -> list[Shard]:
        embedding, vocab_rows = "model.embed_tokens.weight", padded_vocabulary(self.model.vocab, self.tp)
        shards = [self.vocabulary(vocab_rows, embedding)]
        for layer in range(self.model.layers):
            shards += self._layer(f"model.layers.{layer}.", self.model.has_experts(layer))
        shards.append(self.whole("model.norm.weight"))
        if not self.model.tied:
            shards.append(self.vocabulary(vocab_rows, "lm_head.weight"))
        elif self.model.kind == "qwen3_moe":  # its lm_head is never the embedding itself
            shards.append(self.vocabulary(vocab_rows, "lm_head.weight", embedding))
        return shards

    def _layer(self, prefix: str, experts: bool) -> list[Shard]:
        attention = self._attention if self.model.latent is None else self._latent_attention
        return [
            self.whole(prefix + "input_layernorm.weight"),
            *attention(prefix + "self_attn."),
            self.whole(prefix + "post_attention_layernorm.weight"),
            *(self._moe(prefix + "mlp.") if experts else self._mlp(prefix + "mlp.")),
        ]

    def _attention(self, prefix: str) -> list[Shard]:
        shards = [self._qkv(prefix, "weight")]
        if self.model.qkv_bias:
            shards.append(self._qkv(prefix, "bias"))
        if self.model.qk_norm:
            shards += [self.whole(f"{prefix}{part}_norm.weight") for part in "qk"]
        return [*shards, self.cols(prefix + "o_proj.weight")]

    def _qkv(self, prefix: str, parameter: str) -> Shard:
        q, k, v = (self.tensors[f"{prefix}{part}_proj.{parameter}"] for part in "qkv")
        return stack_regions(
            f"{prefix}qkv_proj.{parameter}", [split_rows(q, self.rank, self.tp, _FIELD), self._kv_rows(k), self._kv_rows(v)]
        )

    def _kv_rows(self, tensor: HFTensor) -> Region:
        heads = self.model.kv_heads
        if self.tp <= heads:
            return split_rows(tensor, self.rank, self.tp, _FIELD)
        return split_rows(tensor, self.rank * heads // self.tp, heads, _FIELD)

    def _latent_attention(self, prefix: str) -> list[Shard]:
        assert self.model.latent is not None
        kv_down = prefix + "kv_a_proj_with_mqa.weight"
        if self.model.latent.q_rank:
            fused = [take_all(self.tensors[prefix + "q_a_proj.weight"]), take_all(self.tensors[kv_down])]
            shards = [stack_regions(prefix + "fused_qkv_a_proj_with_mqa.weight", fused), self.whole(prefix + "q_a_layernorm.weight")]
            shards.append(self.rows(prefix + "q_b_proj.weight"))
        else:
            shards = [self.rows(prefix + "q_proj.weight"), self.whole(kv_down)]
        return [
            *shards,
            self.whole(prefix + "kv_a_layernorm.weight"),
            self.rows(prefix + "kv_b_proj.weight"),
            self.cols(prefix + "o_proj.weight"),
        ]

    def _mlp(self, prefix: str) -> list[Shard]:
        gate_up = [split_rows(self.tensors[f"{prefix}{half}_proj.weight"], self.rank, self.tp, _FIELD) for half in ("gate", "up")]
        return [stack_regions(prefix + "gate_up_proj.weight", gate_up), self.cols(prefix + "down_proj.weight")]

    def _moe(self, prefix: str) -> list[Shard]:
        experts = self.model.experts
        assert experts is not None
        parts, count = self.tp // self.ep, experts.count // self.ep
        ep_rank, part = divmod(self.rank, parts)
        gate_up, down = [], []
        for expert in range(ep_rank * count, (ep_rank + 1) * count):
            mlp = f"{prefix}experts.{expert}."
            gate_up += [split_rows(self.tensors[f"{mlp}{half}_proj.weight"], part, parts, _FIELD) for half in ("gate", "up")]
            down.append(split_cols(self.tensors[mlp + "down_proj.weight"], part, parts, _FIELD))
        shards = [self.whole(prefix + "gate.weight")]
        if experts.correction_bias:
            shards.append(self.whole(prefix + "gate.e_score_correction_bias"))
        shards.append(stack_regions(prefix + "experts.w13_weight", gate_up, experts=count))
        shards.append(stack_regions(prefix + "experts.w2_weight", down, experts=count))
        if experts.shared_ffn:
            shards += self._mlp(prefix + "shared_experts.")
        return shards
