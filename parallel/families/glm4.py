"""GLM-4-0414 and GLM-Z1: norms after attention and MLP too, one tensor for gate and up, rotary positions on half of each head, in pairs."""

from dataclasses import replace

from parallel.attention.softmax import read_softmax
from parallel.hf_config import HFConfig
from parallel.model_geometry import ModelGeometry
from parallel.shards import HFTensor, Weight, make_vector, make_weight, take_rows

ARCHITECTURE = "Glm4ForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(head_dim=128, attention_bias=True, rms_norm_eps=1.5625e-7)  # as in transformers
    config.require(hidden_act="silu")
    rope = replace(config.rope("yarn", share=0.5), interleaved=True)
    attention = read_softmax(config, config.size("head_dim"), rope, qkv_bias=config.flag("attention_bias"))
    return ModelGeometry(**config.widths(), attention=attention, post_norms=True)


def list_layer(model: ModelGeometry, layer: int) -> list[Weight]:
    hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    gate_up = HFTensor(hf + "mlp.gate_up_proj.weight", 2 * model.ffn, model.hidden, "mlp_in")
    halves = take_rows(gate_up, 0, model.ffn), take_rows(gate_up, model.ffn, model.ffn)
    down = HFTensor(hf + "mlp.down_proj.weight", model.hidden, model.ffn, "mlp_out")

    def norm(name: str, megatron_name: str) -> Weight:
        return make_vector(f"{hf}{name}_layernorm.weight", model.hidden, f"{megatron}{megatron_name}.weight")

    return [
        norm("input", "input_layernorm"),
        *model.attention_of(layer).list_weights(model.hidden, hf + "self_attn.", megatron + "self_attention.", model.kv_scales),
        norm("post_self_attn", "self_attn_bda.norm"),
        norm("post_attention", "pre_mlp_layernorm"),
        Weight(halves, megatron + "mlp.linear_fc1.weight", gate_up.name, "rows"),
        make_weight(down, megatron + "mlp.linear_fc2.weight", "cols"),
        norm("post_mlp", "mlp_bda.norm"),
    ]
