"""What is read from config.json, against transformers' own models; and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from support.geometries import dense_config, published_model

from parallel.hf_widths import MLAGeometry, MoEGeometry
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError

TINY = dense_config("", 3, 64, 4, 2, 96, 50, head_dim=32, pad_token_id=None)
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "head_dim": 8}
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK = LATENT | MOE | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": 16}),  # transformers ignores head_dim here
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", MOE | {"num_experts": 8}),
    "qwen3_moe mixed": ("Qwen3MoeForCausalLM", MOE | {"num_experts": 8, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", DEEPSEEK),
    "deepseek_v3 queries direct": ("DeepseekV3ForCausalLM", DEEPSEEK | {"q_lora_rank": None}),
}


def stacked_experts(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """The checkpoint's experts as transformers 5 holds them: gate_up_proj [E, 2I, H] and down_proj [E, H, I]."""
    stacked: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        match = re.match(r"(.*\.experts)\.\d+\.(\w+)_proj\.weight", name)
        if match is None:
            stacked[name] = shape
        elif match[2] == "gate":
            count = sum(other.startswith(match[1]) and other.endswith("gate_proj.weight") for other in shapes)
            stacked[f"{match[1]}.gate_up_proj"] = [count, 2 * shape[0], shape[1]]
            stacked[f"{match[1]}.down_proj"] = [count, shape[1], shape[0]]
    return stacked


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_transformers(kind):
    import transformers

    architecture, changes = KINDS[kind]
    config = {**TINY, **changes, "model_type": kind.split()[0]}
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        reference = model_class(model_class.config_class(**config))
    shapes = {name: list(value.shape) for name, value in reference.named_parameters()}
    shapes |= {name: list(value.shape) for name, value in reference.named_buffers() if name.endswith("e_score_correction_bias")}
    geometry = ModelGeometry.from_hf_config(config)
    own_shapes = {name: [tensor.rows] if tensor.vector else [tensor.rows, tensor.cols] for name, tensor in geometry.tensors().items()}
    assert stacked_experts(own_shapes) == shapes


def test_deepseek_v3_is_read_whole():
    geometry = published_model("DeepSeek-V3")
    assert geometry.latent == MLAGeometry(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    assert geometry.experts == MoEGeometry(256, 2048, shared_ffn=2048, dense_layers=frozenset({0, 1, 2}), correction_bias=True)
    assert geometry.head_dim == 192


def test_the_number_of_parameters_is_the_published_one():
    published = {"Qwen3-235B-A22B": 235.09e9, "Llama-3.1-8B": 8.03e9, "Qwen2.5-7B": 7.616e9, "Llama-3.2-1B": 1.236e9, "DeepSeek-V3": 671e9}
    for name, parameters in published.items():
        tensors = published_model(name).tensors().values()
        assert sum(tensor.rows * tensor.cols for tensor in tensors) == pytest.approx(parameters, rel=1e-3)


def test_head_dim_is_hidden_by_heads_where_the_config_leaves_it_open():
    config = {**TINY, "model_type": "llama"}
    del config["head_dim"]
    assert ModelGeometry.from_hf_config(config).head_dim == ModelGeometry.from_hf_config(config | {"head_dim": None}).head_dim == 16


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "llama", "attention_bias": True}, "attention_bias = True: is not supported for llama"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias = True: is not supported for llama"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim = None: must be a positive integer"),
        ({"model_type": "llama", "head_dim": None, "hidden_size": 65}, r"head_dim = None: is missing, and hidden_size \(65\)"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "moe_intermediate_size = None: is missing"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8}, "num_experts = None: is missing"),
        ({"model_type": "deepseek_v3"}, "q_lora_rank = None: is missing"),
        ({"model_type": "deepseek_v3", **DEEPSEEK, "kv_lora_rank": 0}, "kv_lora_rank = 0: must be a positive integer"),
    ],
)
def test_configs_that_cannot_be_read_are_refused_by_field(changes, words):
    with pytest.raises(GeometryError, match=words):
        ModelGeometry.from_hf_config({**TINY, **changes})
