"""Geometries that several tests shard: a small one, the published models, and the plan of a random case of `slow_cut.cases`."""

from dataclasses import fields
from functools import cache

from parallel.attention import SoftmaxAttention
from parallel.megatron_shards import build_trainer_shards
from parallel.model_geometry import ModelGeometry, MoEGeometry
from parallel.reshard import add_scale_transfers, reshard
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Shard, take_all
from support.golden.slow_cut import as_fp8

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 256, 8, 4, 128, 1024, 300


def small_model(layers=2, **changes):
    """Return a Qwen3 of two layers, with `changes` to its fields or to those of its attention."""
    own = {field.name for field in fields(SoftmaxAttention)} & changes.keys()
    heads = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "qk_norm": True} | {name: changes.pop(name) for name in own}
    widths = {"family": "qwen3", "hidden": HIDDEN, "ffn": FFN, "vocab": VOCAB}
    return ModelGeometry(attention=(SoftmaxAttention(**heads),) * layers, **(widths | changes))


SMALL_MOE = small_model(layers=1, family="qwen3_moe", experts=MoEGeometry(count=4, ffn=256))


def source_shards(case):
    return build_trainer_shards(case.model, case.train, format_of=as_fp8)


def target_shards(case):
    return build_engine_shards(case.model, case.rollout_tp, case.rollout_ep, case.engines)


def plan_case(case, format_of=as_fp8):
    """Return the transfers from the case's trainer to its engines."""
    return add_scale_transfers(reshard(source_shards(case), target_shards(case), format_of))


_WIDTHS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def dense_config(family, *widths, **more):
    """Return the shape fields of a dense model's config.json; `widths` are those of _WIDTHS."""
    return {"model_type": family, "rope_theta": 1e6, **dict(zip(_WIDTHS, widths, strict=True)), **more}


_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_DEEPSEEK = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK |= {"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3}
_GLM = {"head_dim": 128, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160, "moe_intermediate_size": 1536}
PUBLISHED = {  # widths of the models' own config.json files; written here again, because tests hold configs/models against them
    "Llama-3.1-8B": dense_config("llama", 32, 4096, 32, 8, 14336, 128256),
    "Llama-3.1-70B": dense_config("llama", 80, 8192, 64, 8, 28672, 128256),
    "Llama-3.2-1B": dense_config("llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "Qwen2.5-0.5B": dense_config("qwen2", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True),
    "Qwen2.5-7B": dense_config("qwen2", 28, 3584, 28, 4, 18944, 152064),
    "Qwen2.5-32B": dense_config("qwen2", 64, 5120, 40, 8, 27648, 152064),
    "Qwen3-0.6B": dense_config("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True),
    "Qwen3-8B": dense_config("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "Qwen3-32B": dense_config("qwen3", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "GLM-4-9B-0414": dense_config("glm4", 40, 4096, 32, 2, 13696, 151552, head_dim=128, attention_bias=True, partial_rotary_factor=0.5),
    "GLM-4-32B-0414": dense_config("glm4", 61, 6144, 48, 2, 23040, 151552, head_dim=128, attention_bias=False, partial_rotary_factor=0.5),
    "Qwen3-30B-A3B": dense_config("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, **_QWEN3_MOE, moe_intermediate_size=768),
    "Qwen3-235B-A22B": dense_config("qwen3_moe", 94, 4096, 64, 4, 12288, 151936, **_QWEN3_MOE, moe_intermediate_size=1536),
    "GLM-4.5": dense_config("glm4_moe", 92, 5120, 96, 8, 12288, 151552, **_GLM, first_k_dense_replace=3),
    "DeepSeek-V3": dense_config("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, **_DEEPSEEK),
}


def hybrid_config(family, layers, hidden, heads, kv_heads, value_heads, **more):
    """Return a wrapper's config.json with the fields of Qwen3.5 that matter; `family` is that of the wrapper."""
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    text = {
        **{"model_type": f"{family}_text", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads},
        **{"num_key_value_heads": kv_heads, "head_dim": 256, "attn_output_gate": True, "attention_bias": False, "hidden_act": "silu"},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
        **{"linear_conv_kernel_dim": 4, "full_attention_interval": 4, "mamba_ssm_dtype": "float32", "vocab_size": 248320},
        **{"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), "mlp_only_layers": [], "dtype": "bfloat16"},
        **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6},
        **{"rope_parameters": rope | {"mrope_interleaved": True}, "tie_word_embeddings": False},
    }
    name = "".join(part.capitalize() for part in family.split("_")).replace("Qwen35", "Qwen3_5")
    own = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": family, "image_token_id": 248056}
    return own | {"tie_word_embeddings": False, "vision_config": {"depth": 27}, "text_config": text | more}


def _experts(count, top_k, ffn):
    return {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": ffn, "shared_expert_intermediate_size": ffn}


_NEXT = {name: value for name, value in hybrid_config("qwen3_5", 48, 2048, 16, 2, 32)["text_config"].items() if "rope" not in name}
_NEXT = {
    name: value for name, value in _NEXT.items() if name not in ("mtp_num_hidden_layers", "layer_types", "mtp_use_dedicated_embeddings")
}
HYBRIDS = {
    "Qwen3.5-9B": hybrid_config("qwen3_5", 32, 4096, 16, 4, 32, intermediate_size=12288),
    "Qwen3.6-27B": hybrid_config("qwen3_5", 64, 5120, 24, 4, 48, intermediate_size=17408),
    "Qwen3.5-35B-A3B": hybrid_config("qwen3_5_moe", 40, 2048, 16, 2, 32, **_experts(256, 8, 512)),
    "Qwen3.5-122B-A10B": hybrid_config("qwen3_5_moe", 48, 3072, 32, 2, 64, **_experts(256, 8, 1024)),
    "Qwen3-Next-80B-A3B": _NEXT
    | {"model_type": "qwen3_next", "vocab_size": 151936, "intermediate_size": 5120, "norm_topk_prob": True, "decoder_sparse_step": 1}
    | {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "rope_scaling": None, **_experts(512, 10, 512)},
}
PUBLISHED |= HYBRIDS


@cache
def published_model(name):
    return ModelGeometry.from_hf_config(PUBLISHED[name])


def build_checkpoint_shards(model):
    """Return the checkpoint itself as shards: every tensor whole."""
    return [Shard(tensor.name, tensor.rows, tensor.cols, (take_all(tensor),)) for tensor in model.tensors().values()]
