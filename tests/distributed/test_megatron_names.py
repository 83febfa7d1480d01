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
from support.families import ARCHITECTURES, cut_everything
from support.megatron_models import restart_megatron

from parallel.families import FAMILIES
from parallel.layout import Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry

WORLD = 4
MODELS = ARCHITECTURES | {"tied": ARCHITECTURES["qwen3"] | {"tie_word_embeddings": True}}
CASES = [
    *((name, cut_everything(name)) for name in FAMILIES),
    ("qwen3", Layout(pp=2, vpp=2, dp=2)),
    ("qwen3", Layout(pp=2, first_stage_layers=3, dp=2)),
    ("deepseek_v3", Layout(pp=2, last_stage_layers=3, dp=2)),
    ("qwen3", Layout(tp=4)),  # more ranks than kv heads
    ("tied", Layout(tp=2, pp=2)),
    ("llama", Layout(tp=2, dp=2)),
    ("llama", Layout(tp=2, cp=2)),
    ("qwen2", Layout(tp=4)),
    ("qwen3_moe", Layout(ep=2, dp=4)),
    ("qwen3_moe", Layout(tp=2, ep=2, etp=2, dp=2)),
    ("qwen3_moe", Layout(tp=2, ep=4, etp=1, dp=2)),
    ("qwen3_moe", Layout(etp=2, ep=2, dp=4)),
    ("qwen3_moe", Layout(tp=2, pp=2, vpp=2, ep=2, etp=1)),
    ("deepseek_v3", Layout(dp=4, ep=4)),
    ("deepseek_direct_q", Layout(tp=4, ep=2, etp=2)),
]


def config_of(model: ModelGeometry, layout: Layout) -> Any:
    """Megatron's configuration of a tiny model."""
    import torch.nn.functional as F
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from megatron_rl.mcore.transformer_config import attention_options, expert_options

    return (MLATransformerConfig if model.latent else TransformerConfig)(
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
        num_layers_in_first_pipeline_stage=layout.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers or None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        context_parallel_size=layout.cp,
        pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="alltoall",
        **attention_options(model),
        **expert_options(model),
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
            split = layout.tp if re.search("linear_(q|kv)_down_proj", name) else 1  # here local linear layers, which Megatron would split
            shapes[whole_model_name(gpt, name)] = [value.shape[0] * split, *value.shape[1:]]
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
        shards = build_megatron_shards(geometry, layout, coordinates)
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
                "parameters": {shard.name: list(shard.shape) for shard in shards if "_bda." not in shard.name},  # post norms are ours
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
