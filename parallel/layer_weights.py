"""Building blocks of the model families. Each function takes two name prefixes: the checkpoint's, which SGLang shares, and Megatron's."""

from typing import NamedTuple

from parallel.model_geometry import ModelGeometry
from parallel.shards import HFTensor, Weight, make_vector, make_weight


class MLPNames(NamedTuple):
    """Names of a layer's module with the MLP or the experts, of its matrices, and of the router's bias."""

    module: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str = "gate.e_score_correction_bias"


_NAMES = MLPNames()


def pre_norm_layer(model: ModelGeometry, layer: int, names: MLPNames = _NAMES) -> list[Weight]:
    """Return the decoder layer that nearly every family has: a norm before the attention, and a norm before the MLP or the experts."""
    hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    attention = model.attention_of(layer)
    mlp = (f"{hf}{names.module}.", megatron + "mlp.")
    return [
        make_vector(hf + "input_layernorm.weight", model.hidden, megatron + "input_layernorm.weight"),
        *attention.list_weights(model.hidden, f"{hf}{attention.module}.", megatron + "self_attention.", model.kv_scales),
        make_vector(hf + "post_attention_layernorm.weight", model.hidden, megatron + "pre_mlp_layernorm.weight"),
        *(list_experts(model, *mlp, names) if model.has_experts(layer) else list_mlp(model, *mlp, model.ffn, names)),
    ]


def list_mlp(model: ModelGeometry, hf: str, megatron: str, ffn: int, names: MLPNames = _NAMES) -> list[Weight]:
    gate_up = [HFTensor(f"{hf}{half}.weight", ffn, model.hidden, "mlp_in") for half in (names.gate, names.up)]
    down = HFTensor(f"{hf}{names.down}.weight", model.hidden, ffn, "mlp_out")
    return [
        make_weight(gate_up, megatron + "linear_fc1.weight", "rows", hf + "gate_up_proj.weight"),
        make_weight(down, megatron + "linear_fc2.weight", "cols"),
    ]


def list_experts(model: ModelGeometry, hf: str, megatron: str, names: MLPNames = _NAMES) -> list[Weight]:
    """Return a router, its experts and the shared experts. SGLang stacks the experts in two parameters."""
    assert model.experts is not None
    moe = model.experts
    router = HFTensor(hf + "gate.weight", moe.count, model.hidden, "router")
    weights = [make_weight(router, megatron + "router.weight", "whole")]
    if moe.correction_bias:
        weights.append(make_vector(hf + names.router_bias, moe.count, megatron + "router.expert_bias", "router_bias"))
    stacked = hf + "experts.w13_weight", hf + "experts.w2_weight"
    for expert in range(moe.count):
        mlp = list_mlp(model, f"{hf}experts.{expert}.", f"{megatron}experts.local_experts.{expert}.", moe.ffn, names)
        weights += [weight._replace(sglang=name, expert=expert) for weight, name in zip(mlp, stacked, strict=True)]
    if moe.shared_ffn:
        weights += list_mlp(model, f"{hf}{moe.shared_name}.", megatron + "shared_experts.", moe.shared_ffn)
    if moe.shared_gate:
        gate = HFTensor(hf + "shared_expert_gate.weight", 1, model.hidden, "shared_gate")
        weights.append(make_weight(gate, megatron + "shared_experts.gate_weight", "whole"))
    return weights
