"""Building blocks of the model families. Each function takes two name prefixes: the checkpoint's, which SGLang shares, and Megatron's."""

from parallel.model_geometry import ModelGeometry
from parallel.shards import HFTensor, Weight, make_vector, make_weight


def pre_norm_layer(model: ModelGeometry, layer: int) -> list[Weight]:
    """Return the decoder layer that nearly every family has: a norm before the attention, and a norm before the MLP or the experts."""
    hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    attend = list_attention if model.latent is None else list_latent_attention
    mlp = (hf + "mlp.", megatron + "mlp.")
    return [
        make_vector(hf + "input_layernorm.weight", model.hidden, megatron + "input_layernorm.weight"),
        *attend(model, hf + "self_attn.", megatron + "self_attention."),
        make_vector(hf + "post_attention_layernorm.weight", model.hidden, megatron + "pre_mlp_layernorm.weight"),
        *(list_experts(model, *mlp) if model.has_experts(layer) else list_mlp(model, *mlp, model.ffn)),
    ]


def list_attention(model: ModelGeometry, hf: str, megatron: str) -> list[Weight]:
    """Return grouped-query attention, with biases, norms and KV-cache scales as the model has them."""
    kv = model.kv_heads * model.head_dim
    rows = {"q": model.heads * model.head_dim, "k": kv, "v": kv}
    qkv = [HFTensor(f"{hf}{part}_proj.weight", size, model.hidden, "attention_qkv") for part, size in rows.items()]
    weights = [make_weight(qkv, megatron + "linear_qkv.weight", "qkv", hf + "qkv_proj.weight")]
    if model.qkv_bias:
        biases = [HFTensor(f"{hf}{part}_proj.bias", size, 1, "bias", vector=True) for part, size in rows.items()]
        weights.append(make_weight(biases, megatron + "linear_qkv.bias", "qkv", hf + "qkv_proj.bias"))
    if model.qk_norm:
        weights += [make_vector(f"{hf}{part}_norm.weight", model.head_dim, f"{megatron}{part}_layernorm.weight") for part in "qk"]
    if model.kv_scales:
        weights.append(make_vector(hf + "attn.kv_scales", 2, megatron + "core_attention.kv_scales", "kv_scales"))
    output = HFTensor(hf + "o_proj.weight", model.hidden, rows["q"], "attention_output")
    return [*weights, make_weight(output, megatron + "linear_proj.weight", "cols")]


def list_latent_attention(model: ModelGeometry, hf: str, megatron: str) -> list[Weight]:
    """Return multi-latent attention. If there are two down projections, SGLang keeps them as one parameter."""
    assert model.latent is not None
    mla, q_width, down = model.latent, model.heads * model.head_dim, ""
    if mla.q_rank:
        down = hf + "fused_qkv_a_proj_with_mqa.weight"
        q_a = HFTensor(hf + "q_a_proj.weight", mla.q_rank, model.hidden, "attention_qkv")
        q_b = HFTensor(hf + "q_b_proj.weight", q_width, mla.q_rank, "attention_qkv")
        queries = [
            make_weight(q_a, megatron + "linear_q_down_proj.weight", "whole", down),
            make_vector(hf + "q_a_layernorm.weight", mla.q_rank, megatron + "q_layernorm.weight"),
            make_weight(q_b, megatron + "linear_q_up_proj.weight", "rows"),
        ]
    else:
        q = HFTensor(hf + "q_proj.weight", q_width, model.hidden, "attention_qkv")
        queries = [make_weight(q, megatron + "linear_q_proj.weight", "rows")]
    kv_a = HFTensor(hf + "kv_a_proj_with_mqa.weight", mla.kv_rank + mla.rope_dim, model.hidden, "attention_qkv")
    kv_b = HFTensor(hf + "kv_b_proj.weight", model.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, "attention_qkv")
    output = HFTensor(hf + "o_proj.weight", model.hidden, model.heads * mla.v_dim, "attention_output")
    return [
        *queries,
        make_weight(kv_a, megatron + "linear_kv_down_proj.weight", "whole", down),
        make_vector(hf + "kv_a_layernorm.weight", mla.kv_rank, megatron + "kv_layernorm.weight"),
        make_weight(kv_b, megatron + "linear_kv_up_proj.weight", "rows"),
        make_weight(output, megatron + "linear_proj.weight", "cols"),
    ]


def list_mlp(model: ModelGeometry, hf: str, megatron: str, ffn: int) -> list[Weight]:
    gate_up = [HFTensor(f"{hf}{half}_proj.weight", ffn, model.hidden, "mlp_in") for half in ("gate", "up")]
    down = HFTensor(hf + "down_proj.weight", model.hidden, ffn, "mlp_out")
    return [
        make_weight(gate_up, megatron + "linear_fc1.weight", "rows", hf + "gate_up_proj.weight"),
        make_weight(down, megatron + "linear_fc2.weight", "cols"),
    ]


def list_experts(model: ModelGeometry, hf: str, megatron: str) -> list[Weight]:
    """Return a router, its experts and the shared experts. SGLang stacks the experts in two parameters."""
    assert model.experts is not None
    moe = model.experts
    router = HFTensor(hf + "gate.weight", moe.count, model.hidden, "router")
    weights = [make_weight(router, megatron + "router.weight", "whole")]
    if moe.correction_bias:
        name = hf + "gate.e_score_correction_bias"
        weights.append(make_vector(name, moe.count, megatron + "router.expert_bias", "router_bias"))
    stacked = hf + "experts.w13_weight", hf + "experts.w2_weight"
    for expert in range(moe.count):
        mlp = list_mlp(model, f"{hf}experts.{expert}.", f"{megatron}experts.local_experts.{expert}.", moe.ffn)
        weights += [weight._replace(sglang=name, expert=expert) for weight, name in zip(mlp, stacked, strict=True)]
    if moe.shared_ffn:
        weights += list_mlp(model, hf + "shared_experts.", megatron + "shared_experts.", moe.shared_ffn)
    return weights
