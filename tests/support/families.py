"""A tiny config.json of every family, for all tests that run over families. A new family needs one `_add` here and nothing else."""

import pytest

from parallel.formats import FP8
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

VOCABULARY = 384
KINDS = ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_5_text", "gpt_oss")
"""One family of each kind of attention and experts, which the default tests run."""
CLASSES = {}
"""Family -> its class in transformers."""
ARCHITECTURES = {}
"""What the trainer builds, and variants: widths whose FP8 blocks are whole at a tensor parallel size of 2, settings that matter within 40
tokens."""
ENGINE_ARCHITECTURES = {}
"""What an engine on a CPU serves: as small as its FP8 blocks allow."""
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "initializer_range": 0.05, "tie_word_embeddings": False,
}  # fmt: skip
_TRAINED = _COMMON | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SERVED = _COMMON | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rope_theta": 100.0,
    "attention_bias": False,
}


def _add(family, architecture, trained, served):
    """Add a family, by its class in transformers: `trained` overrides `_TRAINED`, `served` overrides `_SERVED`.

    `trained` sets the width of heads: `{"head_dim": 128}`, or `_HEADS_OF_64` if config.json has no `head_dim`. `served` sets
    `architectures` if SGLang's class has another name.
    """
    CLASSES[family] = architecture
    ARCHITECTURES[family] = _TRAINED | {"model_type": family} | trained
    ENGINE_ARCHITECTURES[family] = _SERVED | {"model_type": family, "architectures": [architecture]} | served


_HEADS_OF_64 = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_add("llama", "LlamaForCausalLM", _HEADS_OF_64 | {"rope_scaling": LLAMA3}, {"mlp_bias": False})
_add(
    "smollm3",
    "SmolLM3ForCausalLM",
    _HEADS_OF_64 | {"no_rope_layer_interval": 2},
    {"num_hidden_layers": 2, "no_rope_layers": [0, 1]},
)
del ENGINE_ARCHITECTURES["smollm3"]["head_dim"]
_add("mistral", "MistralForCausalLM", {"head_dim": 128, "sliding_window": None}, {"sliding_window": None})
_add("qwen2", "Qwen2ForCausalLM", _HEADS_OF_64 | {"tie_word_embeddings": True}, {"use_sliding_window": False})
_add("qwen3", "Qwen3ForCausalLM", {"head_dim": 128}, {"num_hidden_layers": 2, "use_sliding_window": False})

_HALF_ROTATED = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
_add("glm4", "Glm4ForCausalLM", _HALF_ROTATED, _HALF_ROTATED)

_QWEN3_MOE = {"moe_intermediate_size": 256, "num_experts_per_tok": 2, "norm_topk_prob": True}
_add(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _QWEN3_MOE | {"head_dim": 128, "num_experts": 4, "mlp_only_layers": [1]},
    _QWEN3_MOE | {"num_hidden_layers": 2, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
)
ARCHITECTURES["qwen3_moe_raw_weights"] = ARCHITECTURES["qwen3_moe"] | {
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
}
_DEEPSEEK = {
    "rms_norm_eps": 1e-3,  # not that of the latent norms, which is always 1e-6
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,  # SGLang has no default
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
_add(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _DEEPSEEK
    | {"max_position_embeddings": 256, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    _DEEPSEEK
    | {"num_hidden_layers": 2, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}
    | {"head_dim": 64},  # transformers: the rotary part
)
_INDEXER = {"index_topk": 384, "index_n_heads": 4, "index_head_dim": 128, "num_nextn_predict_layers": 0}
_add(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    ARCHITECTURES["deepseek_v3"] | _INDEXER | {"model_type": "deepseek_v32"},
    ENGINE_ARCHITECTURES["deepseek_v3"] | _INDEXER | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
)
_GLM_5 = {"qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "rope_scaling": None}
_add(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    ARCHITECTURES["deepseek_v32"] | _GLM_5 | {"model_type": "glm_moe_dsa"},
    ENGINE_ARCHITECTURES["deepseek_v32"] | _GLM_5 | {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]},
)
_FLASH = {name: value for name, value in _DEEPSEEK.items() if name not in ("moe_layer_freq", "scoring_func")} | {
    "qk_nope_head_dim": 192, "v_head_dim": 256, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
}  # fmt: skip
_add("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _FLASH, _FLASH | {"num_hidden_layers": 2, "head_dim": 64})
_GLM4_MOE = {name: value for name, value in _DEEPSEEK.items() if not any(part in name for part in ("lora", "_head_dim", "eps"))} | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
}
_add(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _GLM4_MOE | {"num_experts_per_tok": 4},
    _GLM4_MOE | {"num_hidden_layers": 2, "num_experts_per_tok": 4, "num_nextn_predict_layers": 0},
)
ARCHITECTURES["glm4_moe_air"] = ARCHITECTURES["glm4_moe"] | {"attention_bias": False, "use_qk_norm": False, "n_group": 4, "topk_group": 2}
ARCHITECTURES["qwen3_yarn"] = ARCHITECTURES["qwen3"] | {"max_position_embeddings": 256, "rope_scaling": YARN}
for _name in ("glm4_moe_air", "qwen3_moe_raw_weights"):
    ARCHITECTURES[_name] |= {"rope_scaling": YARN}
ARCHITECTURES["glm4_yarn"] = ARCHITECTURES["glm4"] | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}
ARCHITECTURES["llama_yarn"] = ARCHITECTURES["llama"] | {"rope_scaling": YARN | {"attention_factor": 0.9, "truncate": False}}
del ARCHITECTURES["llama_yarn"]["rope_theta"]  # as in Llama 2
for _name in ("glm4", "qwen2"):
    ENGINE_ARCHITECTURES[_name] |= {"rope_scaling": YARN | {"attention_factor": 0.9}}
ENGINE_ARCHITECTURES["qwen2"]["rope_scaling"] = YARN | {"attn_factor": 0.8782488562869419, "truncate": False}
ARCHITECTURES["deepseek_direct_q"] = ARCHITECTURES["deepseek_v3"] | {
    "q_lora_rank": None,
    "rope_scaling": None,
    "n_group": 1,
    "topk_group": 1,
}

_HYBRID = {
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 2,  # SGLang has no default
    "mamba_ssm_dtype": "float32",
}
_SHARED = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
_add("qwen3_5_text", "Qwen3_5ForCausalLM", _HYBRID, _HYBRID | {"num_hidden_layers": 2})
_add(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _HYBRID | _SHARED | {"num_experts": 4},
    _HYBRID | _SHARED | {"num_hidden_layers": 2, "num_experts": 8},
)
_add(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _HYBRID | _SHARED | {"num_experts": 4, "norm_topk_prob": True},
    _HYBRID | _SHARED | {"num_hidden_layers": 2, "num_experts": 8, "norm_topk_prob": True},
)

_MINIMAX = {"head_dim": 128, "rotary_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "use_qk_norm": True}
_add("minimax_m2", "MiniMaxM2ForCausalLM", _MINIMAX, _MINIMAX | {"num_hidden_layers": 2, "num_key_value_heads": 1})
del ENGINE_ARCHITECTURES["minimax_m2"]["attention_bias"]

_GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "attention_bias": True, "swiglu_limit": 0.5, "head_dim": 64,
    "rope_scaling": YARN | {"rope_type": "yarn", "truncate": False}, "max_position_embeddings": 512,
}  # fmt: skip
_add("gpt_oss", "GptOssForCausalLM", _GPT_OSS, _GPT_OSS | {"num_hidden_layers": 2, "num_attention_heads": 4})

QUANTIZED = tuple(
    name
    for name, config in ENGINE_ARCHITECTURES.items()
    if not any(kind.refuse_engine_format(FP8) for kind in ModelGeometry.from_hf_config(config).attention)
)
"""Families that run in FP8. gpt-oss does not, and its experts are not cut over ranks: tests of its own have its layouts."""


def parse_layout(name):
    """Return the layout of a name such as "tp2 pp2"."""
    return Layout(**{size.rstrip("0123456789"): int(size[-1]) for size in name.split()})


def cut_everything(family):
    """Return a layout of four ranks that is tensor and pipeline parallel, with experts spread over the tensor-parallel ranks."""
    moe = ModelGeometry.from_hf_config(ARCHITECTURES[family]).experts
    return Layout(tp=2, pp=2, ep=2, etp=1) if moe else Layout(tp=2, pp=2)


def by_kind(names):
    """Return families as parameters of a test. All but those in `KINDS` are `long`."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.long) for name in names]
