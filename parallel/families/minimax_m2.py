"""MiniMax-M2, M2.1, M2.5: norms over all heads of q and of k, rotary positions on a part of each head, experts chosen by sigmoids."""

from functools import partial

from parallel.attention.softmax import read_softmax
from parallel.hf_config import MOST_EXPERTS, HFConfig, refuse
from parallel.layer_weights import MLPNames, pre_norm_layer
from parallel.model_geometry import ModelGeometry, MoEGeometry

list_layer = partial(pre_norm_layer, names=MLPNames("block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias"))
ARCHITECTURE = "MiniMaxM2ForCausalLM"
_OF_OTHERS = ("use_mtp", "mtp_transformer_layers", "num_mtp_modules", "mlp_intermediate_size", "shared_moe_mode")
"""Fields of layers that the models do not have, or that no checkpoint has: those for multi-token prediction."""


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(head_dim=128, num_key_value_heads=8, num_experts_per_tok=8)  # as in transformers
    config.with_defaults(num_local_experts=config.get("num_experts", 256))
    fixed = {"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True, "scoring_func": "sigmoid"}  # SGLang has others
    config.with_defaults(**fixed).require(**fixed, hidden_act="silu", sliding_window=None, shared_intermediate_size=0)
    config.require(attn_type_list=[1] * config.layers())
    config.require(layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0)
    config.read.update(_OF_OTHERS)
    widths, dim = config.widths(), config.size("head_dim")
    rotated = config.size("rotary_dim", most=dim) if config.get("rotary_dim") is not None else dim
    rope = config.rope(share=rotated / dim, any_share=True)
    config.with_defaults(rotary_dim=int(dim * rope.share)).require(rotary_dim=int(dim * rope.share))  # what SGLang reads
    count = config.size("num_local_experts", most=MOST_EXPERTS)
    if (top_k := config.size("num_experts_per_tok", most=count)) == 1:
        raise refuse("num_experts_per_tok", 1, "at least 2")
    return ModelGeometry(
        **widths,
        attention=read_softmax(config, dim, rope, qk_norm=True, over_all_heads=True),
        experts=MoEGeometry(count, ffn=widths["ffn"], correction_bias=True, top_k=top_k, sigmoid=True),
        tied_in_engine=False,
    )
