"""DeepSeek-V3 (arXiv 2412.19437): multi-latent attention, rotary positions extended by YaRN, a few dense layers, then experts."""

from parallel import mtp_layers
from parallel.attention import Indexer, LatentAttention
from parallel.hf_config import CORRECT, MOST_EXPERTS, MOST_LAYERS, HFConfig, refuse
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry, MoEGeometry
from parallel.shards import GeometryError

list_layer, list_mtp_layer, list_mtp_copies = pre_norm_layer, mtp_layers.list_mtp_layer, mtp_layers.list_copies
ARCHITECTURE = "DeepseekV3ForCausalLM"


def read(config: HFConfig, indexer: Indexer | None = None) -> ModelGeometry:
    heads = config.size("num_attention_heads")
    config.with_defaults(num_key_value_heads=heads).require(num_key_value_heads=heads)  # every head has its own
    config.with_defaults(num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5, moe_layer_freq=1)
    config.with_defaults(first_k_dense_replace=3, n_shared_experts=1, num_nextn_predict_layers=1)
    config.with_defaults(topk_method="noaux_tc", scoring_func="sigmoid")  # SGLang has no defaults
    config.require(hidden_act="silu", attention_bias=False, mlp_bias=False, rope_interleave=True, moe_layer_freq=1)
    rope = config.rope("yarn", latent=True)
    latent = LatentAttention(
        heads=heads,
        q_rank=0 if config.get("q_lora_rank", "missing") is None else config.size("q_lora_rank"),
        kv_rank=config.size("kv_lora_rank"),
        nope_dim=config.size("qk_nope_head_dim"),
        rope_dim=config.size("qk_rope_head_dim"),
        v_dim=config.size("v_head_dim"),
        rope=rope,
        indexer=indexer,
    )
    config.require(head_dim=latent.rope_dim)  # transformers takes it for the width that rotates
    if rope.yarn is not None and rope.yarn.mscale is None:
        raise GeometryError("config.json rope mscale", None, "is missing, and libraries disagree on its default", CORRECT)
    return ModelGeometry(
        **config.widths(),
        attention=config.in_every_layer(latent, "indexed_attention" if indexer else "full_attention"),
        experts=read_experts(config),
        mtp_layers=config.size("num_nextn_predict_layers", least=0, most=MOST_LAYERS),
    )


def read_experts(config: HFConfig) -> MoEGeometry:
    """Read routing as in section 2.1.2: sigmoid scores, a bias that only affects the choice, group-limited choice, shared experts."""
    config.require(scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True)
    count = config.size("n_routed_experts", most=MOST_EXPERTS)
    top_k, groups, used = config.size("num_experts_per_tok", most=count), config.size("n_group", most=count), config.size("topk_group")
    if count % groups or count == groups or used > groups:  # a group is ranked by its best two experts
        rule = f"must divide n_routed_experts ({count}), leave at least 2 in a group, and be at least topk_group ({used})"
        raise GeometryError("config.json n_group", groups, rule, CORRECT)
    if top_k > (reachable := used * count // groups):
        rule = f"must be at most {reachable}, the number of experts in topk_group ({used}) groups"
        raise GeometryError("config.json num_experts_per_tok", top_k, rule, CORRECT)
    if top_k == 1:
        raise refuse("num_experts_per_tok", 1, "at least 2")
    if groups > used and top_k // used != 2:  # Megatron ranks a group by its best top_k / topk_group experts, DeepSeek by its best two
        raise refuse("num_experts_per_tok / topk_group", top_k / used, 2)
    ffn, first_dense = config.size("moe_intermediate_size"), config.size("first_k_dense_replace", least=0)
    return MoEGeometry(
        count=count,
        ffn=ffn,
        shared_ffn=ffn * config.size("n_shared_experts"),  # SGLang needs one
        dense_layers=frozenset(range(min(first_dense, config.layers()))),
        correction_bias=True,
        top_k=top_k,
        sigmoid=True,
        scale=config.number("routed_scaling_factor"),
        groups=groups,
        groups_used=used,
    )
