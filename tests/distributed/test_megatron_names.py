"""The geometry's Megatron shards against real Megatron models: every rank's parameters, by name and shape, at several layouts.

Four gloo ranks build one tiny model after another.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.megatron_models import restart_megatron

from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry

WORLD = 4
DENSE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 60,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": DENSE | {"model_type": "qwen3"},
    "tied": DENSE | {"model_type": "qwen3", "tie_word_embeddings": True},
    "llama": DENSE | {"model_type": "llama", "head_dim": None},
    "qwen2": DENSE | {"model_type": "qwen2"},
    "qwen3_moe": DENSE | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    "deepseek_v3": DENSE
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
}
MODELS["latent_q"] = MODELS["deepseek_v3"] | {"q_lora_rank": None}
CASES = [
    ("qwen3", Layout(tp=2, pp=2)),
    ("qwen3", Layout(pp=2, vpp=2, dp=2)),
    ("qwen3", Layout(tp=4)),  # more ranks than kv heads
    ("tied", Layout(tp=2, pp=2)),
    ("llama", Layout(tp=2, dp=2)),
    ("llama", Layout(tp=2, cp=2)),
    ("qwen2", Layout(tp=2, pp=2)),
    ("qwen2", Layout(tp=4)),
    ("qwen3_moe", Layout(ep=2, dp=4)),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=2, dp=2)),
    ("qwen3_moe", Layout(tp=2, ep=4, etp=1, dp=2)),
    ("qwen3_moe", Layout(etp=2, ep=2, dp=4)),
    ("qwen3_moe", Layout(tp=2, pp=2, vpp=2, ep=2, etp=1)),
    ("deepseek_v3", Layout(dp=4, ep=4)),
    ("deepseek_v3", Layout(tp=2, pp=2, ep=2, etp=1)),
    ("latent_q", Layout(tp=4, ep=2, etp=2)),
]


def config_of(model: ModelGeometry, layout: Layout) -> Any:
    """Megatron's configuration of a tiny model."""
    import torch.nn.functional as F
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    kind, more = TransformerConfig, {}
    if model.experts:
        more = {
            "num_moe_experts": model.experts.count,
            "moe_ffn_hidden_size": model.experts.ffn,
            "moe_layer_freq": [int(model.has_experts(layer)) for layer in range(model.layers)],
            "moe_shared_expert_intermediate_size": model.experts.shared_ffn or None,
            "moe_router_enable_expert_bias": model.experts.correction_bias,
            "moe_router_score_function": "sigmoid" if model.experts.correction_bias else "softmax",
            "moe_token_dispatcher_type": "alltoall",
        }
    if model.latent:
        kind = MLATransformerConfig
        more |= {
            "multi_latent_attention": True,
            "q_lora_rank": model.latent.q_rank or None,
            "kv_lora_rank": model.latent.kv_rank,
            "qk_head_dim": model.latent.nope_dim,
            "qk_pos_emb_head_dim": model.latent.rope_dim,
            "v_head_dim": model.latent.v_dim,
            "rope_type": "rope",
        }
    else:
        more |= {"num_query_groups": model.kv_heads, "kv_channels": model.head_dim}
    return kind(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        qk_layernorm=model.qk_norm or model.latent is not None,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
        pipeline_dtype=torch.float32,
        **more,
    )


class NoCoreAttention(torch.nn.Module):
    """Takes the place of the core attention, which has no parameters; Megatron's local one refuses latent attention."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def real_parameters(model: ModelGeometry, layout: Layout) -> dict[str, list[int]]:
    """Builds this rank's chunks with Megatron; name -> shape, layers and experts numbered over the whole model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = config_of(model, layout)
    shapes: dict[str, list[int]] = {}
    for chunk in range(layout.vpp):
        stage = chunk if layout.vpp > 1 else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = NoCoreAttention
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=model.vocab,
            max_sequence_length=32,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="none" if model.latent else "rope",
            vp_stage=stage,
        )
        tensors = dict(gpt.named_parameters()) | {name: value for name, value in gpt.named_buffers() if name.endswith("expert_bias")}
        for name, value in tensors.items():
            assert whole_model_name(gpt, name) not in shapes
            shapes[whole_model_name(gpt, name)] = list(value.shape)
    return shapes


def whole_model_name(gpt: Any, name: str) -> str:
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match is None:
        return name
    layer = gpt.decoder.layers[int(match[1])]
    name = f"decoder.layers.{layer.layer_number - 1}.{name[match.end() :]}"
    return re.sub(r"local_experts\.(\d+)", lambda expert: f"local_experts.{layer.mlp.local_expert_indices[int(expert[1])]}", name)


def describe_rank() -> list[dict[str, Any]]:
    """Of each case: this rank's parameters and coordinates, as the geometry says and as Megatron says."""
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_latent_attention as latent

    if not isinstance(latent.TELinear, type):  # without Transformer Engine, MLASelfAttention still asks isinstance(..., TELinear)
        latent.TELinear = type("TELinear", (torch.nn.Module,), {})
    cases = []
    for name, layout in CASES:
        restart_megatron(layout)
        geometry, coordinates = ModelGeometry.from_hf_config(MODELS[name]), layout.coordinates(dist.get_rank())
        shards = build_megatron_shards(geometry, layout, coordinates, split_latent=True)
        real_coordinates = {
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "cp": parallel_state.get_context_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "ep": parallel_state.get_expert_model_parallel_rank(),
            "etp": parallel_state.get_expert_tensor_parallel_rank(),
            "edp": parallel_state.get_expert_data_parallel_rank(),
        }
        cases.append(
            {
                "parameters": {shard.name: list(shard.shape) for shard in shards},
                "real_parameters": real_parameters(geometry, layout),
                "coordinates": vars(coordinates),
                "real_coordinates": real_coordinates,
            }
        )
    return cases


@pytest.fixture(scope="module")
def ranks(worlds) -> list[list[dict[str, Any]]]:
    return worlds(WORLD).call(describe_rank)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{layout}" for name, layout in CASES])
def test_every_rank_holds_the_parameters_the_geometry_says(ranks, case):
    for rank, cases in enumerate(ranks):
        assert cases[case]["coordinates"] == cases[case]["real_coordinates"], rank
        assert cases[case]["parameters"] == cases[case]["real_parameters"], rank


def test_the_cases_use_every_dimension():
    assert {name for _, layout in CASES for name, size in vars(layout).items() if size > 1} == set(vars(Layout()))
    assert all(layout.world_size == WORLD and replace(layout) == layout for _, layout in CASES)
