"""A new Qwen3, Qwen3-MoE, Qwen3.5, or GLM-4.5 model: config.json, random weights, and a byte-level tokenizer."""

import math
from pathlib import Path
from typing import Any

import torch

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from examples.arithmetic.config import ArchitectureConfig
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import write_checkpoint
from parallel.formats import FORMATS
from parallel.model_geometry import ModelGeometry, with_trained_mtp
from parallel.shards import HFTensor

_EXPERT_FIELDS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
_HYBRID_FIELDS = {
    "full_attention_interval",
    *(f"linear_{name}" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")),
}
_NEXT_LAYERS = "num_nextn_predict_layers"


def make_hf_config(architecture: ArchitectureConfig, eos_token_id: int, high: str) -> dict[str, Any]:
    """Return the config.json of a Qwen3, of a Qwen3-MoE if it has experts, of a Qwen3.5 if it has gated delta nets, or of a GLM-4.5 if it
    has layers for MTP."""
    return {
        "architectures": ["Qwen3MoeForCausalLM" if architecture.num_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if architecture.num_experts else "qwen3",
        **architecture.model_dump(exclude={*_EXPERT_FIELDS, *_HYBRID_FIELDS, _NEXT_LAYERS, "tie_word_embeddings", "initializer_range"}),
        "rope_scaling": None,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "initializer_range": architecture.initializer_range,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": architecture.num_hidden_layers,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
        "torch_dtype": FORMATS[high].dtype,
        **(_expert_fields(architecture) if architecture.num_experts and not architecture.num_nextn_predict_layers else {}),
        **(_hybrid_fields(architecture) if architecture.full_attention_interval else {}),
        **(_glm_fields(architecture) if architecture.num_nextn_predict_layers else {}),
    }


def _expert_fields(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Return the fields for experts in every layer, with normalized routing weights as in Qwen3-30B-A3B."""
    return {
        **architecture.model_dump(include=_EXPERT_FIELDS),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


def _hybrid_fields(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Return the fields of a Qwen3.5 that differ from a Qwen3 model."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **architecture.model_dump(include=_HYBRID_FIELDS),
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 0,
    }


def _glm_fields(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Return the fields of a GLM-4.5 that differ from a Qwen3-MoE model."""
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **architecture.model_dump(include={_NEXT_LAYERS, "num_experts_per_tok", "moe_intermediate_size"}),
        "norm_topk_prob": True,
        "n_routed_experts": architecture.num_experts,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
    }


def make_random_tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return random float32 weights: norms and biases of time steps multiply by one, matrices are N(0, initializer_range). Heads of gated
    delta nets remember about 1 to 64 tokens."""
    generator, model = torch.Generator().manual_seed(seed), ModelGeometry.from_hf_config(config)

    def make(tensor: HFTensor) -> torch.Tensor:
        if tensor.name.endswith("A_log"):
            return -torch.linspace(0, math.log(64), tensor.rows)
        if tensor.vector:
            zero_centered = model.zero_centered_norms and tensor.role == "norm" and not tensor.name.endswith("linear_attn.norm.weight")
            return torch.zeros(tensor.rows) if zero_centered else torch.ones(tensor.rows)
        scale = tensor.cols**-0.5 if tensor.role == "delta_conv" else config["initializer_range"]
        return torch.randn(tensor.shape, generator=generator) * scale

    return {tensor.name: make(tensor) for tensor in (model.tensors() | model.list_kept()).values()}


def make_random_checkpoint(folder: Path, architecture: ArchitectureConfig, seed: int) -> None:
    """Write a checkpoint with random FP32 weights and the byte-level tokenizer into `folder`."""
    make_byte_tokenizer(folder)
    hf_config = make_hf_config(architecture, load_tokenizer(folder).eos_token_id, "fp32")
    write_checkpoint(folder, hf_config, make_random_tensors(with_trained_mtp(hf_config), seed), None)
