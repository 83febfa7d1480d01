"""What every family reads from config.json, compared with transformers' models, and which settings it refuses."""

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.families import ARCHITECTURES, CLASSES, ENGINE_ARCHITECTURES
from support.geometries import published_model

from megatron_rl.hf.checkpoint_format import find_stack
from parallel.attention import LatentAttention
from parallel.families import ALIASES, FAMILIES, load_family
from parallel.hf_config import Rope, Yarn
from parallel.model_geometry import ModelGeometry, MoEGeometry
from parallel.refused_families import REASONS
from parallel.shards import GeometryError

TESTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe_air")
LLAMA, QWEN2, QWEN3, MOE, DEEPSEEK, AIR = (ARCHITECTURES[name] for name in TESTED)
DISTINCT = {  # all widths differ, so that none can be mistaken for another
    **{"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50, "head_dim": 32},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"num_experts": 8, "n_routed_experts": 8, "moe_intermediate_size": 40, "n_shared_experts": 2},
}
VARIANTS: dict[str, dict[str, Any]] = ARCHITECTURES | {"llama tied": LLAMA | {"tie_word_embeddings": True}}


def test_every_family_is_in_the_test_tables_and_parameter_counts_match_published_counts():
    assert set(FAMILIES) == CLASSES.keys() == ENGINE_ARCHITECTURES.keys() == {config["model_type"] for config in ARCHITECTURES.values()}
    assert all(callable(load_family(name).read) and callable(load_family(name).list_layer) for name in FAMILIES)
    assert REASONS.keys().isdisjoint({*FAMILIES, *ALIASES})
    published = {"Qwen3-235B-A22B": 235.09e9, "Llama-3.1-8B": 8.03e9, "Qwen2.5-7B": 7.616e9, "Llama-3.2-1B": 1.236e9, "DeepSeek-V3": 671e9}
    published |= {"GLM-4-9B-0414": 9.4e9, "GLM-4-32B-0414": 32.57e9}
    for name, parameters in published.items():
        tensors = published_model(name).tensors().values()
        assert sum(tensor.rows * tensor.cols for tensor in tensors) == pytest.approx(parameters, rel=1e-3)


def stacked_experts(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return shapes with experts stacked as in transformers 5: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    stacked: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        name = name.replace(".block_sparse_moe.", ".mlp.").replace(".w1.", ".gate_proj.")
        match = re.match(r"(.*\.experts)\.(\d+)\.(\w+?)(?:_proj)?\.weight", name)
        if (place := find_stack(name)) is not None:  # transposed
            stacked[place[0]] = [place[1] + 1, *shape[::-1]]
        elif match is None:
            stacked[name] = shape
        elif match[3] == "gate":  # the last one's number tells how many there are
            stacked[f"{match[1]}.gate_up_proj"] = [int(match[2]) + 1, 2 * shape[0], shape[1]]
            stacked[f"{match[1]}.down_proj"] = [int(match[2]) + 1, shape[1], shape[0]]
    return stacked


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_match_transformers(variant):
    import transformers

    config = VARIANTS[variant]
    config = config | {name: value for name, value in DISTINCT.items() if config.get(name) is not None} | {"pad_token_id": None}
    model_class = getattr(transformers, CLASSES[config["model_type"]])
    with torch.device("meta"):
        reference = model_class(model_class.config_class(**deepcopy(config)))  # it writes into rope_scaling
    shapes = {name: list(value.shape) for name, value in reference.named_parameters()}
    shapes |= {name: list(value.shape) for name, value in reference.named_buffers() if name.endswith("e_score_correction_bias")}
    geometry = ModelGeometry.from_hf_config(config)
    own_shapes = {name: list(tensor.shape) for name, tensor in (geometry.tensors() | geometry.list_kept()).items()}
    assert stacked_experts(own_shapes) == shapes


def test_published_models_with_experts():
    geometry = published_model("DeepSeek-V3")
    kind, *others = set(geometry.attention)
    assert kind == LatentAttention(128, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, rope=geometry.rope) and not others
    routing = {"top_k": 8, "sigmoid": True, "scale": 2.5, "groups": 8, "groups_used": 4}
    dense = frozenset({0, 1, 2})
    assert geometry.experts == MoEGeometry(256, 2048, shared_ffn=2048, dense_layers=dense, correction_bias=True, **routing)
    assert kind.head_dim == 192 and geometry.mtp_layers == 1
    geometry, defaults = published_model("GLM-4.5"), ModelGeometry.from_hf_config(AIR)
    kind, default = geometry.attention[0], defaults.attention[0]
    assert kind.qkv_bias and kind.qk_norm and not (default.qkv_bias or default.qk_norm)
    assert (geometry.rope.share, geometry.mtp_layers, geometry.norm_eps) == (0.5, 1, 1e-5)
    routing = {"top_k": 8, "sigmoid": True}
    dense = frozenset({0, 1, 2})
    assert geometry.experts == MoEGeometry(160, 1536, shared_ffn=1536, dense_layers=dense, correction_bias=True, **routing)
    assert (defaults.experts.groups, defaults.experts.groups_used, defaults.experts.scale) == (4, 2, 2.5)


def test_layers_without_positions_and_the_part_that_rotates():
    smollm3, minimax = ARCHITECTURES["smollm3"], ARCHITECTURES["minimax_m2"]
    assert [kind.rope for kind in ModelGeometry.from_hf_config(smollm3).attention] == [Rope(5e5), None] * 2
    longer = smollm3 | {"no_rope_layers": [0, 1, 1, 0, 1, 1]}
    assert [kind.rope is None for kind in ModelGeometry.from_hf_config(longer).attention] == [True, False, False, True]
    described = ModelGeometry.describe_to_engine(smollm3)
    assert (described["model_type"], described["no_rope_layers"]) == ("llama", [1, 0, 1, 0])
    written = {name: value for name, value in minimax.items() if name not in ("rotary_dim", "rope_theta")}
    written |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}}  # by transformers 5
    for config in (minimax, written):
        assert ModelGeometry.from_hf_config(config).rope == Rope(5e5, 0.25)
        assert ModelGeometry.describe_to_engine(config)["rotary_dim"] == 32


def test_rotary_positions_routing_and_the_default_head_dim():
    for config in (LLAMA, LLAMA | {"head_dim": None}):
        assert ModelGeometry.from_hf_config(config).attention[0].head_dim == 64
    assert ModelGeometry.from_hf_config(QWEN3).rope == Rope(5e5)
    new = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    assert ModelGeometry.from_hf_config(QWEN3 | new).rope == Rope(1e5)
    assert ModelGeometry.from_hf_config(LLAMA).rope == Rope(5e5, llama3_factor=8.0)
    for config in (QWEN2, QWEN3, MOE, LLAMA, ARCHITECTURES["glm4"], AIR):
        assert ModelGeometry.from_hf_config(config | {"rope_scaling": YARN_OF_CARD}).rope.yarn == Yarn(4.0, 32768, 32.0, 1.0)
    published = YARN_OF_CARD | {"attn_factor": 0.8782488562869419}  # DeepSeek-R1-0528-Qwen3-8B
    assert ModelGeometry.from_hf_config(QWEN3 | {"rope_scaling": published}).rope.yarn.attn_factor == 0.8782488562869419
    for ours in ({"attention_factor": 1.0}, {"attention_factor": 1.0, "attn_factor": 0.8782488562869419}):
        config = QWEN3 | {"rope_scaling": YARN_OF_CARD | ours}
        engine = ModelGeometry.describe_to_engine(config)["rope_scaling"]
        assert engine["attn_factor"] == ModelGeometry.from_hf_config(config).rope.yarn.attn_factor == pytest.approx(0.8782488562869419)
    assert ModelGeometry.from_hf_config(DEEPSEEK).rope.yarn == Yarn(4.0, 64, 32.0, 1.0, mscale=1.0, mscale_all_dim=0.7)

    def routing(config: dict[str, Any]) -> tuple[Any, ...]:
        moe = ModelGeometry.from_hf_config(config).experts
        return moe.top_k, moe.sigmoid, moe.normalized, moe.scale, moe.groups, moe.groups_used

    defaults = {name: value for name, value in MOE.items() if name not in ("norm_topk_prob", "num_experts_per_tok")}
    assert routing(MOE) == (2, False, True, 1.0, 1, 1) and routing(defaults | {"num_experts": 8}) == (8, False, False, 1.0, 1, 1)
    assert routing(DEEPSEEK | {"routed_scaling_factor": 2.0}) == (4, True, True, 2.0, 4, 2)


YARN_OF_CARD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""As the model cards of Qwen2.5 and Qwen3 have it."""
LLAMA3, YARN = LLAMA["rope_scaling"], DEEPSEEK["rope_scaling"]
ABSENT = object()


@pytest.mark.parametrize("config, changes, words", [
    (QWEN3, {"model_type": "mamba"}, "model_type = mamba: is not a supported model family"),
    (QWEN3, {"model_type": None}, "model_type = None: is not a supported model family"),
    (QWEN3, {"model_type": "phi3"}, "model_type = phi3: is not supported: it stores queries, keys, and values in one tensor"),
    (ARCHITECTURES["minimax_m2"], {"partial_rotary_factor": 0.5}, "rotary_dim = 32: is not .* supports only 64"),
    (ARCHITECTURES["minimax_m2"], {"use_qk_norm": False}, "use_qk_norm = False: is not supported"),
    (ARCHITECTURES["minimax_m2"], {"attn_type_list": [1, 1, 0, 1]}, "attn_type_list"),
    (ARCHITECTURES["smollm3"], {"no_rope_layers": [1, 0]}, "no_rope_layers = .*: must be 1, .* or 0 for each of 4 layers"),
    (ARCHITECTURES["smollm3"], {"use_sliding_window": True}, "use_sliding_window = True: is not supported"),
    (LLAMA, {"attention_bias": True}, "attention_bias = True: is not supported"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias = True: is not supported"),
    (LLAMA, {"head_dim": None, "hidden_size": 65}, r"head_dim = None: is missing, and hidden_size \(65\)"),
    (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
    (QWEN3, {"head_dim": None}, "head_dim = None: is missing"),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act"),
    (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (QWEN3, {"rope_theta": ABSENT}, "rope_theta"),
    (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope original_max_position_embeddings = None"),
    (QWEN3, {"rope_scaling": YARN_OF_CARD | {"attention_factor": 1.0, "attn_factor": 2.0}}, "attention_factor = 1.0: .*, 2.277"),
    (QWEN3, {"rope_scaling": YARN_OF_CARD | {"attn_factor": "2"}}, "rope attn_factor = 2: must be a positive number"),
    (DEEPSEEK, {"rope_scaling": YARN | {"attn_factor": 2.0}}, "rope attn_factor = 2.0: .* supports only 1.0"),
    (QWEN2, {"rope_scaling": YARN_OF_CARD | {"mscale": 1.0}}, "mscale_all_dim = None: is missing"),
    (QWEN2, {"rope_scaling": YARN_OF_CARD | {"factor": "4"}}, "factor = 4: must be a positive number"),
    (QWEN3, {"rope_scaling": YARN_OF_CARD | {"beta_fast": None}}, "rope beta_fast = None: is missing"),
    (DEEPSEEK, {"rope_scaling": YARN | {"truncate": False}}, "rope truncate = False: .* supports only True"),
    (AIR, {"rope_scaling": YARN_OF_CARD, "rope_theta": 1.0}, "rope_theta = 1.0: must be greater than 1"),
    (QWEN3, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope scaling = dynamic: .* supports only default and llama3 and yarn"),
    (DEEPSEEK, {"rope_scaling": YARN_OF_CARD}, "rope mscale = None: is missing"),
    (QWEN3, {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor"),
    (QWEN3, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "llama3"),
    (MOE, {"moe_intermediate_size": ABSENT}, "moe_intermediate_size = None: is missing"),
    (MOE, {"num_experts": ABSENT}, "num_local_experts = None: is missing"),
    (MOE, {"num_experts_per_tok": 1}, "norm_topk_prob"),
    (DEEPSEEK, {"q_lora_rank": ABSENT}, "q_lora_rank = None: is missing"),
    (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank = 0: must be a positive integer"),
    (DEEPSEEK, {"rope_scaling": LLAMA3}, "llama3"),
    (DEEPSEEK, {"rope_scaling": YARN | {"mscale_all_dim": 0}}, "mscale_all_dim"),
    (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor = 1.0: .* supports only YaRN's own factor"),
    (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
    (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
    (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob"),
    (DEEPSEEK, {"topk_group": 1, "num_experts_per_tok": 4, "n_group": 2}, "topk_group = 4.0"),
    (AIR, {"partial_rotary_factor": 1.0}, "partial_rotary_factor = 1.0"),
    (AIR, {"rope_scaling": LLAMA3}, "rope scaling = llama3"),
    (AIR, {"norm_topk_prob": False}, "norm_topk_prob"),
    (QWEN3, {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config = .* is not known to the trainer"),
    (LLAMA, {"attention_multiplier": 0.5}, "attention_multiplier = 0.5: is not known to the trainer"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window = 4096: is not known to the trainer"),
    (QWEN3, {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    (QWEN3, {"tie_word_embeddings": "false"}, "tie_word_embeddings = false: must be true or false"),
    (QWEN3, {"rope_scaling": ["yarn"]}, "must be an object"),
    (QWEN3, {"rope_parameters": "default"}, "rope_parameters = default: must be an object"),
    (QWEN3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": LLAMA3}, "rope_scaling = .* differs from"),
    (QWEN3, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "new": 1}}, "rope new = 1: is not known"),
    (QWEN3, {"rope_theta": "1e6"}, "rope_theta = 1e6: must be a positive number"),
    (QWEN3, {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan: must be a positive number"),
    (MOE, {"num_local_experts": 8}, "num_experts = 4: differs from num_local_experts = 8"),
    (MOE, {"num_experts_per_tok": 999}, "num_experts_per_tok = 999: must be at most 4"),
    (MOE, {"mlp_only_layers": "1"}, "mlp_only_layers = 1: must be a list of integers"),
    (DEEPSEEK, {"first_k_dense_replace": None}, "first_k_dense_replace = None: is missing"),
    (DEEPSEEK, {"n_group": 3}, "n_group = 3: must divide"),
    (DEEPSEEK, {"n_group": 8, "topk_group": 2}, "n_group = 8: .* leave at least 2 in a group"),
    (DEEPSEEK, {"topk_group": 1}, "num_experts_per_tok = 4: must be at most 2, the number of experts in topk_group"),
    (DEEPSEEK, {"n_shared_experts": 0}, "n_shared_experts = 0: must be a positive integer"),
    (DEEPSEEK, {"head_dim": 192}, "head_dim = 192: .* only 64"),
    (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads = 2: .* only 4"),
    (QWEN3, {"rope_theta": 1.0}, "rope_theta = 1.0: must be greater than 1"),
    (DEEPSEEK, {"qk_rope_head_dim": 63}, "qk_rope_head_dim = 63.0: elements of a head rotate in pairs"),
    (AIR, {"head_dim": 126}, "head_dim = 63.0: elements of a head rotate in pairs"),
    *((DEEPSEEK, {name: None}, name) for name in ("rope_interleave", "norm_topk_prob", "topk_method", "hidden_act", "n_shared_experts")),
    (LLAMA, {"tie_word_embeddings": None}, "tie_word_embeddings = None: must be true or false"),
    (LLAMA, {"original_max_position_embeddings": 0}, "original_max_position_embeddings = 0: is not known"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"low_freq_factor": True}}, "low_freq_factor = True"),
    (LLAMA, {"is_causal": False}, "is_causal = False"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: must be at most 1000"),
    (MOE, {"num_local_experts": None}, "num_local_experts = None"),
    (MOE, {"num_experts": 10**9}, "num_experts = 1000000000: must be at most 10000"),
])  # fmt: skip
def test_unsupported_settings_are_refused_by_field(config, changes, words):
    with pytest.raises(GeometryError, match=f"config.json .*{words}"):
        ModelGeometry.from_hf_config({name: value for name, value in (config | changes).items() if value is not ABSENT})


def test_an_engine_reads_every_field_that_the_family_resolved_and_no_other():
    """As transformers 5 writes config.json, without fields that SGLang needs, and with null fields on whose presence it acts."""
    config = {name: value for name, value in DEEPSEEK.items() if name not in ("moe_layer_freq", "topk_method", "scoring_func")}
    config |= {"model_type": "kimi_k2", "architectures": ["Other"], "dual_chunk_attention_config": None, "megatron_rl_trains_mtp": True}
    resolved = ModelGeometry.resolve_config(config)
    named = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "megatron_rl_trains_mtp": True}
    assert resolved == DEEPSEEK | named | {"num_nextn_predict_layers": 1}
