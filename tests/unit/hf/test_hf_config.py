"""What a config.json says beyond widths, and what of it the trainer refuses rather than computes wrongly."""

import pytest

from megatron_rl.errors import UserError
from megatron_rl.hf.config import RoutingConfig, YarnConfig, parse_forward_config, rope_theta

QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = QWEN3 | {"model_type": "deepseek_v3", "rope_scaling": YARN, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": True}


def test_rotary_positions_in_both_places_plain_and_stretched():
    assert parse_forward_config(QWEN3).rope.theta == rope_theta(QWEN3) == 1e6 and parse_forward_config(QWEN3).routing is None
    new = parse_forward_config(QWEN3 | {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})
    assert new.rope.theta == 1e5 and new.rope.yarn is new.rope.llama3_factor is None
    with pytest.raises(UserError, match="rope_theta"):
        rope_theta({})
    assert parse_forward_config(QWEN3 | {"model_type": "llama", "rope_scaling": LLAMA3}).rope.llama3_factor == 32.0
    assert parse_forward_config(DEEPSEEK).rope.yarn == YarnConfig(40.0, 4096, 32.0, 1.0, 1.0, 1.0)


def test_routing():
    assert parse_forward_config(MOE).routing == RoutingConfig(top_k=8, sigmoid=False, normalized=True)
    assert parse_forward_config(QWEN3 | {"model_type": "qwen3_moe"}).routing == RoutingConfig(top_k=8, sigmoid=False, normalized=False)
    deepseek = parse_forward_config(DEEPSEEK | {"routed_scaling_factor": 2.0}).routing
    assert deepseek == RoutingConfig(top_k=8, sigmoid=True, normalized=True, scale=2.0, groups=8, groups_used=4)


@pytest.mark.parametrize(
    "config, changes, named",
    [
        (QWEN3, {"model_type": "mamba"}, "mamba"),
        (QWEN3, {"model_type": None}, "None"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (QWEN3, {"rope_scaling": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor"),
        (QWEN3, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "llama3"),
        (DEEPSEEK, {"rope_scaling": LLAMA3}, "llama3"),
        (DEEPSEEK, {"rope_scaling": YARN | {"mscale_all_dim": 0}}, "mscale_all_dim"),
        (DEEPSEEK, {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK, {"topk_group": 2}, "topk_group"),
        (MOE, {"num_experts_per_tok": 1}, "norm_topk_prob"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config, changes, named):
    with pytest.raises(UserError, match=named):
        parse_forward_config(config | changes)
