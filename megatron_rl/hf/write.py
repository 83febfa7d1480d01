"""Reads and writes Hugging Face checkpoints: config.json, safetensors, tokenizer; a folder is whole or absent. Imports without torch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.config import ArchitectureConfig
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    import torch


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)  # mkdtemp makes it private
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], tokenizer_from: Path | None) -> None:
    """Writes config.json and model.safetensors into an existing folder, and copies the tokenizer's files from another checkpoint."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer_from is not None:
        for file in list_tokenizer_files(tokenizer_from):
            shutil.copy(file, folder / file.name)


def list_tokenizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that belong to its tokenizer and generation defaults."""
    names = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "generation_config.json")
    return sorted(file for name in names for file in folder.glob(name))


def make_hf_config(architecture: ArchitectureConfig, eos_token_id: int, high: str) -> dict[str, Any]:
    """config.json of a Qwen3 model with the given widths, or of a Qwen3-MoE one where it has experts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM" if architecture.num_experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if architecture.num_experts else "qwen3",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_hidden_layers": architecture.num_hidden_layers,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        "head_dim": architecture.head_dim,
        "max_position_embeddings": architecture.max_position_embeddings,
        "rope_theta": architecture.rope_theta,
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
        "torch_dtype": {"bf16": "bfloat16", "fp32": "float32"}[high],
        **(_experts(architecture) if architecture.num_experts else {}),
    }


def _experts(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Every layer has them, and the chosen ones' weights add up to one, as in Qwen3-30B-A3B."""
    return {
        "num_experts": architecture.num_experts,
        "num_experts_per_tok": architecture.num_experts_per_tok,
        "moe_intermediate_size": architecture.moe_intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
    }


def make_random_tensors(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Fresh float32 weights: norms are one, everything else is N(0, initializer_range)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * config["initializer_range"]
        for name, shape in shapes.items()
    }


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face checkpoint. Raises UserError when it is missing or no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError("model.path", str(folder), "holds no config.json", "give a Hugging Face checkpoint folder, or add [model.create]")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError("model.path", str(path), f"is no valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError("model.path", str(path), "must be a JSON object")
    return config
