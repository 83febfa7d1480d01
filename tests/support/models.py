"""Small checkpoints of every architecture, made from scratch, and random samples for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import ArchitectureConfig, PrecisionConfig
from megatron_rl.data.byte_tokenizer import SPECIAL_TOKENS, load_tokenizer, make_byte_tokenizer
from megatron_rl.hf.create import make_hf_config, make_random_tensors
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import quantize_weight
from parallel.model_geometry import ModelGeometry
from parallel.reshard import scale_name

VOCABULARY = 384
FP32 = {"mode": "bf16", "high": "fp32"}
"""`precision` of a run without FP8, in float32: what remains is the order of sums."""
TENSORS = 3 + 4 + 4 * 2
"""What a sync of one layer proves: embedding, last norm, lm_head; four norms; four FP8 weights with their scales."""
FP8 = {"mode": "fp8_unified", "high": "fp32"}


_TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_HEADS_OF_64 = _TINY | {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _HEADS_OF_64
    | {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen2": _HEADS_OF_64 | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": _TINY | {"model_type": "qwen3", "head_dim": 128},
    "qwen3_moe": _TINY
    | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": _TINY
    | {
        "model_type": "deepseek_v3",
        "max_position_embeddings": 256,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
}
"""Every architecture: widths whose FP8 blocks are whole at a tensor parallel size of 2, and settings that matter within 40 tokens."""
ARCHITECTURES["qwen3_moe_raw_weights"] = ARCHITECTURES["qwen3_moe"] | {
    "norm_topk_prob": False,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
}
ARCHITECTURES["deepseek_direct_q"] = ARCHITECTURES["deepseek_v3"] | {
    "q_lora_rank": None,
    "rope_scaling": None,
    "n_group": 1,
    "topk_group": 1,
}


def make_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """Writes a checkpoint of any architecture: FP32 weights, without a tokenizer. Norms are near one, biases near zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for tensor in ModelGeometry.from_hf_config(config).tensors().values():
        values = torch.randn((tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols), generator=generator)
        tensors[tensor.name] = 1 + 0.2 * values if tensor.role == "norm" else 0.1 * values if tensor.vector else 0.05 * values
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, {"torch_dtype": "float32", **config}, tensors, None)
    return folder


def make_checkpoint(folder: Path, seed: int = 0, **widths: Any) -> Path:
    """Writes a checkpoint of FP32 weights; two heads of 128 and two kv heads, so that tensor parallelism of 2 fits."""
    make_byte_tokenizer(folder)
    architecture = ArchitectureConfig(**{"num_hidden_layers": 1, "initializer_range": 0.05, "rope_theta": 100.0, **widths})
    config = make_hf_config(architecture, load_tokenizer(folder).eos_token_id, "fp32")
    shapes = {
        tensor.name: (tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols)
        for tensor in ModelGeometry.from_hf_config(config).tensors().values()
    }
    tensors = make_random_tensors(config, shapes, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:  # norms that are not all one, so that a forgotten one is noticed
            tensors[name] = 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
    write_checkpoint(folder, config, tensors, None)
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def edit_config(folder: Path, change: dict[str, Any]) -> None:
    """Overwrites fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def random_sequences(count: int, seed: int, longest: int = 24) -> list[TrainingSample]:
    """Prompts and answers of different lengths. Advantages, old and reference log-probs are made up around those of a uniform
    guess, spread so far that some tokens are clipped on either side."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = VOCABULARY - len(SPECIAL_TOKENS)

    def ids(length: int) -> list[int]:
        return torch.randint(0, ordinary, (length,), generator=generator).tolist()

    sequences = []
    for _ in range(count):
        prompt, answer = (int(torch.randint(2, longest, (), generator=generator)) for _ in range(2))
        sequence = TrainingSample(ids(prompt), ids(answer), advantage=float(torch.randn((), generator=generator)))
        uniform = -torch.log(torch.tensor(float(VOCABULARY)))
        sequence.old_logprobs = uniform + 0.3 * torch.randn(answer, generator=generator)
        sequence.reference_logprobs = uniform + 0.3 * torch.randn(answer, generator=generator)
        sequences.append(sequence)
    return sequences


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
    tensors = make_random_tensors(config, shapes, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            middle = 0.0 if name.endswith("bias") else 1.0
            tensors[name] = middle + 0.2 * torch.randn(tensor.shape, generator=generator)
    return tensors


def served(config: dict[str, Any], tensors: dict[str, torch.Tensor], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """What a checkpoint for the engine holds of these masters: FP8 roles as bytes and scales, the rest in the contract's dtypes."""
    roles, checkpoint = contract.fp8_roles, {}
    high = {"bf16": torch.bfloat16, "fp32": torch.float32}[contract.high]
    for tensor in ModelGeometry.from_hf_config(config).tensors().values():
        value = tensors[tensor.name]
        if tensor.role in roles:
            checkpoint[tensor.name], checkpoint[scale_name(tensor.name)] = quantize_weight(value, contract.scale_format)
        else:
            checkpoint[tensor.name] = value.to(torch.float32 if tensor.role == "router_bias" else high)
    return checkpoint


def write_model(folder: Path, kind: str, precision: dict[str, Any], seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Writes such a checkpoint with a byte tokenizer; returns its config.json. `precision` as in a run's configuration."""
    contract = PrecisionContract.from_config(PrecisionConfig.model_validate(precision))
    folder.mkdir(parents=True, exist_ok=True)
    make_byte_tokenizer(folder)
    eos = load_tokenizer(folder).eos_token_id
    config = config_of(kind, contract, eos_token_id=eos, pad_token_id=eos, bos_token_id=None, **changes)
    write_checkpoint(folder, config, served(config, masters(config, seed), contract), None)
    return config
