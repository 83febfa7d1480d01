"""Tiny random checkpoints of every architecture, as an engine loads them: FP8 blocks with scales, or all in high precision.

Widths are such that tensor parallelism of 2 cuts no 128x128 block. Nothing of Megatron or SGLang.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import PrecisionConfig
from megatron_rl.data.byte_tokenizer import load_tokenizer, make_byte_tokenizer
from megatron_rl.hf import write
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from parallel.model_geometry import ModelGeometry
from parallel.reshard import scale_name

_DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 384,
    "max_position_embeddings": 512,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
ENGINE_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "mlp_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "use_sliding_window": False},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,  # transformers: the rotary part
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
}


def config_of(kind: str, contract: PrecisionContract, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model; `changes` overwrite fields."""
    config = {
        **_DENSE,
        **ENGINE_ARCHITECTURES[kind],
        "model_type": kind,
        "torch_dtype": {"bf16": "bfloat16", "fp32": "float32"}[contract.high],
    }
    if quantization := contract.hf_quantization_config():
        config["quantization_config"] = quantization
    return {**config, **changes}


def masters(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random FP32 tensors of a model by their Hugging Face names; vectors are around one, so that a forgotten norm is noticed."""
    model = ModelGeometry.from_hf_config(config)
    shapes = {tensor.name: (tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols) for tensor in model.tensors().values()}
    found = write.make_random_tensors(config, shapes, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in found.items():
        if tensor.dim() == 1:
            middle = 0.0 if name.endswith("bias") else 1.0
            found[name] = middle + 0.2 * torch.randn(tensor.shape, generator=generator)
    return found


def served(config: dict[str, Any], tensors: dict[str, torch.Tensor], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """What a checkpoint for the engine holds of these masters: FP8 roles as bytes and scales, the rest in the contract's dtypes."""
    roles, found = contract.fp8_roles(), {}
    high = {"bf16": torch.bfloat16, "fp32": torch.float32}[contract.high]
    for tensor in ModelGeometry.from_hf_config(config).tensors().values():
        value = tensors[tensor.name]
        if tensor.role in roles:
            found[tensor.name], found[scale_name(tensor.name)] = quantize_weight(value, contract.scale_format)
        else:
            found[tensor.name] = value.to(torch.float32 if tensor.role == "router_bias" else high)
    return found


def write_model(folder: Path, kind: str, precision: dict[str, Any], seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Writes such a checkpoint with a byte tokenizer; returns its config.json. `precision` as in a run's configuration."""
    contract = PrecisionContract.from_config(PrecisionConfig.model_validate(precision))
    folder.mkdir(parents=True, exist_ok=True)
    make_byte_tokenizer(folder)
    eos = load_tokenizer(folder).eos_token_id
    config = config_of(kind, contract, eos_token_id=eos, pad_token_id=eos, bos_token_id=None, **changes)
    write.write_checkpoint(folder, config, served(config, masters(config, seed), contract), None)
    return config
