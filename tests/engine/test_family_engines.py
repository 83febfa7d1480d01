"""Every model family on one rank of each side: the live engine has the trainer's graph and log-probs, to the bit, up to the model's last
position."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support import trainer_engine
from support.families import ENGINE_ARCHITECTURES, QUANTIZED
from support.models import random_sequences
from support.processes import World

from megatron_rl.config import PrecisionConfig
from megatron_rl.precision.contract import PrecisionContract
from parallel.families import FAMILIES
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from parallel.reshard import list_stored_tensors
from parallel.sglang_shards import build_sglang_shards

PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(6, seed=31)]
MODES = {
    "fp8": {"mode": "fp8_unified", "high": "fp32"},
    "fp8_bf16": {"mode": "fp8_unified", "high": "bf16"},
    "bf16": {"mode": "bf16", "high": "bf16"},
    "fp32": {"mode": "bf16", "high": "fp32"},
    "fp8_kv": {"mode": "fp8_unified", "high": "fp32", "kv": "e4m3"},
    "bf16_kv": {"mode": "bf16", "high": "bf16", "kv": "e4m3"},
    "fp8_layer_kv": {"mode": "fp8_unified", "high": "fp32", "kv": "e4m3_per_layer"},
    "bf16_layer_kv": {"mode": "bf16", "high": "bf16", "kv": "e4m3_per_layer"},
}
SHORT = [("glm4_moe", "fp8_layer_kv"), ("qwen3_next", "fp8"), ("gpt_oss", "bf16")]  # other tests have engines of the other families


@pytest.mark.parametrize(
    "family, mode",
    [
        pytest.param(family, mode, marks=() if (family, mode) in SHORT else pytest.mark.long)
        for family in FAMILIES
        for mode in MODES
        if not ("kv_lora_rank" in ENGINE_ARCHITECTURES[family] and "layer_kv" in mode)  # refused
        and (family in QUANTIZED or "fp8" not in mode)
    ],
)
def test_the_engine_gives_the_trainers_bits(family, mode, tmp_path):
    contract = PrecisionContract.from_config(PrecisionConfig(**MODES[mode]))
    model = replace(
        ModelGeometry.from_hf_config(ENGINE_ARCHITECTURES[family] | {"num_hidden_layers": 2}), kv_scales=contract.scales_kv_by_layer
    )
    tensors = list_stored_tensors(build_sglang_shards(model, 1, 0), contract.format_of)
    with World(1, tmp_path / "world") as world:
        world.call(trainer_engine.start_architecture, family, tmp_path, MODES[mode], Layout(), {}, True)
        world.call(trainer_engine.check_live)
        differences, training, rollout = world.call(trainer_engine.compare_graphs)[0]
        assert differences == [] and set(rollout.edges) == set(training.select_forward().edges)
        world.call(trainer_engine.change_weights, family, 1)
        report = world.call(trainer_engine.sync, 1)[0]
        assert report["proved"] == report["tensors"] == len(tensors)
        limit = min(ENGINE_ARCHITECTURES[family].get(name, 512) for name in ("max_position_embeddings", "index_topk"))
        whole = [[step * token % 250 for token in range(limit)] for step in (7, 11, 13)]
        several = [*PROMPTS, *(ids[:-24] for ids in whole)], 24
        for prompts, tokens in (several, several, ([ids[:-1] for ids in whole], 1)):  # then with the prompts' cache
            generated = world.call(trainer_engine.generate, prompts, tokens)[0]
            assert generated["versions"] == {1} and len(generated["engine"]) >= min(50, len(prompts) * tokens)
            assert max(len(prompt) + len(response) for prompt, response in generated["samples"]) == limit
            assert torch.equal(generated["engine"], generated["trainer"])


@pytest.mark.long
@pytest.mark.parametrize(
    "family, layout, engine, mode",
    [
        ("deepseek_v3", Layout(tp=2), {"tp": 2}, "fp8"),
        ("deepseek_v3", Layout(tp=2), {}, "bf16"),
        ("deepseek_v3", Layout(), {"tp": 2}, "bf16"),
        ("deepseek_v3", Layout(pp=2), {"tp": 2}, "fp32"),
        ("deepseek_v3", Layout(cp=2), {}, "fp8_bf16"),
        ("deepseek_v3", Layout(cp=2, tp=2), {"tp": 2}, "fp8"),
        ("deepseek_v3", Layout(tp=2, ep=2, etp=1), {"tp": 2, "ep": 2}, "bf16"),
        ("deepseek_v32", Layout(tp=2), {}, "fp8"),
        ("deepseek_v32", Layout(pp=2), {"tp": 2}, "bf16"),
        ("deepseek_v32", Layout(dp=2, ep=2), {"tp": 2, "ep": 2}, "fp8_bf16"),
        ("glm_moe_dsa", Layout(), {"tp": 2}, "fp8"),
        ("glm_moe_dsa", Layout(tp=2), {"tp": 2}, "bf16"),
        ("glm_moe_dsa", Layout(tp=2, ep=2, etp=1), {}, "fp8_kv"),
        ("glm_moe_dsa", Layout(tp=2, pp=2), {"tp": 2}, "bf16"),
        ("glm4_moe", Layout(tp=2, ep=2, etp=1), {"tp": 2, "ep": 2}, "bf16"),
        ("glm4_moe", Layout(tp=2, dp=2, ep=2, etp=2), {"tp": 2}, "fp8_bf16"),
        ("qwen3_moe", Layout(tp=2), {"tp": 2, "ep": 2}, "fp8"),
        ("qwen3_moe", Layout(dp=2, ep=2), {"tp": 2}, "bf16"),
        ("qwen3_next", Layout(tp=2), {"tp": 2}, "fp8"),
        ("qwen3_next", Layout(tp=2), {}, "bf16_layer_kv"),
        ("qwen3_next", Layout(tp=2, ep=2, etp=1), {"tp": 2, "ep": 2}, "bf16_kv"),
        ("qwen3_5_text", Layout(pp=2), {"tp": 2}, "bf16"),
        ("qwen3_5_text", Layout(pp=2), {}, "fp8_kv"),
        ("qwen3_5_text", Layout(tp=2, pp=2), {"tp": 2}, "fp8_bf16"),
        ("qwen3_5_moe_text", Layout(cp=2), {}, "fp8_kv"),
        ("qwen3_5_moe_text", Layout(dp=2, ep=2), {"tp": 2}, "bf16"),
        ("qwen3_next", Layout(cp=2, ep=2), {"tp": 2}, "fp8"),
        ("minimax_m2", Layout(), {"tp": 2}, "bf16"),
        ("minimax_m2", Layout(tp=2), {}, "fp8_bf16"),
        ("minimax_m2", Layout(tp=2, ep=2, etp=1), {"tp": 2, "ep": 2}, "fp8"),
        ("smollm3", Layout(tp=2, pp=2), {"tp": 2}, "fp8_bf16"),
        ("smollm3", Layout(cp=2), {}, "bf16"),
        ("gpt_oss", Layout(tp=2, etp=1), {"tp": 2}, "bf16"),
        ("gpt_oss", Layout(tp=2, ep=2, etp=1), {"tp": 2, "ep": 2}, "fp32"),
        ("gpt_oss", Layout(pp=2), {}, "bf16"),
        ("gpt_oss", Layout(cp=2, ep=2, etp=1), {"tp": 2}, "bf16_kv"),
        ("gpt_oss", Layout(dp=2, ep=2), {"tp": 2}, "bf16_layer_kv"),
    ],
)
def test_experts_latent_and_linear_attention_have_the_same_bits_in_any_layout(family, layout, engine, mode, tmp_path):
    prompts = [[7 * token % 250 for token in range(length)] for length in (1, 3, 31, 33, 64, 70, 130)]
    with World(layout.world_size, tmp_path / "world") as world:
        world.call(trainer_engine.start_architecture, family, tmp_path, MODES[mode], layout, engine, True)
        world.call(trainer_engine.change_weights, family, 1)
        world.call(trainer_engine.sync, 1)
        for _ in range(2):  # then with the prompts' cache
            generated = world.call(trainer_engine.generate, prompts)[0]
            assert len(generated["engine"]) >= 100
            assert torch.equal(generated["engine"], generated["trainer"])


WIDE = {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 512}
_FULL, _LINEAR = "full_attention", "linear_attention"
ANY_ORDER = {"num_hidden_layers": 5, "full_attention_interval": None, "layer_types": [_FULL, _FULL, _LINEAR, _LINEAR, _LINEAR]}
ODD = {"num_hidden_layers": 5, "full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 12, "vocab_size": 302}


@pytest.mark.long
@pytest.mark.parametrize(
    "family, changes, layout, engine, mode",
    [
        ("qwen3_5_text", WIDE, Layout(tp=2), {"tp": 4}, "fp8"),
        ("qwen3_5_text", WIDE, Layout(), {"tp": 4}, "bf16_kv"),
        ("qwen3_5_text", ODD, Layout(tp=2), {}, "bf16"),
        ("qwen3_5_text", ODD | {"num_hidden_layers": 7}, Layout(cp=2), {"tp": 2}, "fp32"),
        ("qwen3_next", WIDE | {"shared_expert_intermediate_size": 512}, Layout(tp=2, ep=2, etp=1), {"tp": 4, "ep": 2}, "fp8_bf16"),
        ("qwen3_5_moe_text", ODD, Layout(dp=2, ep=2), {"tp": 2, "ep": 2}, "bf16_layer_kv"),
        ("qwen3_next", ANY_ORDER, Layout(pp=2, first_stage_layers=2), {}, "bf16_layer_kv"),  # the second stage has no cached layer
        ("qwen3_5_moe_text", ANY_ORDER | {"layer_types": ANY_ORDER["layer_types"][::-1]}, Layout(cp=2, ep=2), {"tp": 2, "ep": 2}, "fp8_kv"),
        ("qwen3_5_moe_text", WIDE | {"shared_expert_intermediate_size": 512}, Layout(tp=2, cp=2, ep=4, etp=1), {"tp": 2}, "fp8"),
    ],
)
def test_hybrids_of_any_shape_have_the_same_bits(family, changes, layout, engine, mode, tmp_path):
    """Unequal heads, an odd number of layers, layers in any order, prompts in chunks of 40, and a filter of tokens."""
    prompts = [[11 * token % 250 for token in range(length)] for length in (1, 2, 39, 40, 41, 63, 65, 200, 333)]
    with World(layout.world_size, tmp_path / "world") as world:
        rollout = {"chunked_prefill_size": 40, **engine}
        world.call(partial(trainer_engine.start_architecture, **changes), family, tmp_path, MODES[mode], layout, rollout, True)
        world.call(trainer_engine.sync, 1)
        for sampling in ({}, {"top_p": 0.9, "top_k": 100, "record_kept_tokens": True}):  # then with the prompts' cache
            generated = world.call(trainer_engine.generate, prompts, 16, sampling)[0]
            assert len(generated["engine"]) >= 100
            assert torch.equal(generated["engine"], generated["trainer"])


@pytest.mark.long
@pytest.mark.parametrize(
    "family, mode",
    [
        ("deepseek_v3", "fp8_rollout"),
        ("qwen3_next", "fp8_rollout"),
        ("qwen3_next", "int8_rollout"),
        ("qwen3_5_text", "int8_rollout"),
        ("qwen3_5_moe_text", "int8_rollout"),
    ],
)
def test_an_engine_that_alone_is_quantized_computes_what_is_emulated(family, mode, tmp_path):
    """Latent attention absorbs a quantized projection; gated delta nets have projections in high precision beside quantized ones."""
    with World(1, tmp_path / "world") as world:
        precision = {"mode": mode, "high": "bf16"}
        world.call(trainer_engine.start_architecture, family, tmp_path, precision, Layout(), {}, True)
        world.call(trainer_engine.sync, 1)
        logprobs = world.call(trainer_engine.generate_and_emulate, PROMPTS)[0]
        assert torch.equal(logprobs["engine"], logprobs["emulated"])
        assert (logprobs["engine"] - logprobs["trainer"]).abs().mean() > 1e-3
