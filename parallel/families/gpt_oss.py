"""gpt-oss: attention with sinks, in a sliding window in every other layer, and experts with biases and clamped SwiGLU in every layer.

The checkpoint stacks all experts of a layer. A tensor named `STACK.N` is part N of the stored tensor STACK; a stored matrix is transposed,
unless it is in MXFP4 (`megatron_rl.hf.stacks`). Rows of gate and up alternate."""

from parallel.attention.sinks import SinkAttention
from parallel.hf_config import CORRECT, MOST_EXPERTS, HFConfig, refuse
from parallel.model_geometry import ModelGeometry, MoEGeometry
from parallel.shards import GeometryError, HFTensor, Weight, make_vector, make_weight

ARCHITECTURE = "GptOssForCausalLM"
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(rms_norm_eps=1e-5, head_dim=64, sliding_window=128, num_experts_per_tok=4, attention_bias=True)
    config.with_defaults(swiglu_limit=7.0, num_local_experts=config.get("num_experts", 128), tie_word_embeddings=False)  # as transformers
    config.require(hidden_act="silu", attention_bias=True, hidden_act_alpha=1.702, swiglu_alpha=1.702, tie_word_embeddings=False)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):  # transformers would make up YaRN
        raise GeometryError("config.json rope_parameters", None, "is missing", "add it, or rope_scaling")
    rope = config.rope("yarn")
    config.require(initial_context_length=rope.yarn.original_max_position_embeddings if rope.yarn else None)
    heads, dim = config.head_counts(), config.size("head_dim")
    windows = {_SLIDING: config.size("sliding_window"), _FULL: 0}
    types = _read_types(config)
    kinds = {name: SinkAttention(*heads, dim, qkv_bias=True, rope=rope, window=window) for name, window in windows.items()}
    widths = config.widths()
    count = config.size("num_local_experts", most=MOST_EXPERTS)
    top_k = config.size("num_experts_per_tok", most=count)
    config.require(experts_per_token=top_k)
    if top_k == 1:
        raise refuse("num_experts_per_tok", 1, "at least 2")
    experts = MoEGeometry(count, ffn=widths["ffn"], top_k=top_k, swiglu_limit=config.number("swiglu_limit"))
    return ModelGeometry(**widths, attention=tuple(kinds[each] for each in types), experts=experts)


def _read_types(config: HFConfig) -> list[str]:
    """Return `layer_types`, which transformers makes up if it is absent. SGLang needs it."""
    alternating = [(_FULL, _SLIDING)[layer % 2 == 0] for layer in range(config.layers())]
    types = config.with_defaults(layer_types=alternating).get("layer_types")
    if not isinstance(types, list) or len(types) != config.layers() or not {*map(str, types)} <= {_SLIDING, _FULL}:
        rule = f"must name {_SLIDING} or {_FULL} for each of {config.layers()} layers"
        raise GeometryError("config.json layer_types", types, rule, CORRECT)
    return types


def list_layer(model: ModelGeometry, layer: int) -> list[Weight]:
    hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    return [
        make_vector(hf + "input_layernorm.weight", model.hidden, megatron + "input_layernorm.weight"),
        *model.attention_of(layer).list_weights(model.hidden, hf + "self_attn.", megatron + "self_attention.", model.kv_scales),
        make_vector(hf + "post_attention_layernorm.weight", model.hidden, megatron + "pre_mlp_layernorm.weight"),
        *_list_experts(model, hf + "mlp.", megatron + "mlp."),
    ]


def _list_experts(model: ModelGeometry, hf: str, megatron: str) -> list[Weight]:
    assert model.experts is not None
    moe, hidden = model.experts, model.hidden
    router = HFTensor(hf + "router.weight", moe.count, hidden, "router")
    weights = [
        make_weight(router, megatron + "router.weight", "whole"),
        make_vector(hf + "router.bias", moe.count, megatron + "router.bias", "bias"),
    ]
    for expert in range(moe.count):
        own, stacks = f"{megatron}experts.local_experts.{expert}.", hf + "experts."
        gate_up = HFTensor(f"{stacks}gate_up_proj.{expert}", 2 * moe.ffn, hidden, "mlp_in")
        gate_up_bias = HFTensor(f"{stacks}gate_up_proj_bias.{expert}", 2 * moe.ffn, 1, "bias", vector=True)
        down = HFTensor(f"{stacks}down_proj.{expert}", hidden, moe.ffn, "mlp_out")
        down_bias = HFTensor(f"{stacks}down_proj_bias.{expert}", hidden, 1, "bias", vector=True)
        weights += [
            make_weight(gate_up, own + "linear_fc1.weight", "rows", stacks + "w13_weight", expert),
            make_weight(gate_up_bias, own + "linear_fc1.bias", "rows", stacks + "w13_weight_bias", expert),
            make_weight(down, own + "linear_fc2.weight", "cols", stacks + "w2_weight", expert),
            make_weight(down_bias, own + "linear_fc2.bias", "whole", stacks + "w2_weight_bias", expert),
        ]
    return weights
