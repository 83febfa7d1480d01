"""Tiny Qwen3 checkpoints with random weights, and batches of random sequences, all from fixed seeds. Nothing of Megatron or SGLang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_rl import hf
from megatron_rl.batch import Sequence
from megatron_rl.config import Architecture
from megatron_rl.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, make_byte_tokenizer
from parallel.geometry import ModelGeometry

VOCABULARY = 384
FP32 = {"mode": "bf16", "high": "fp32"}
"""`precision` of a run without FP8, in float32: what remains is the order of sums."""
FP8 = {"mode": "fp8_unified", "high": "fp32"}


def make_checkpoint(folder: Path, seed: int = 0, **widths: Any) -> Path:
    """Writes a checkpoint of FP32 weights; two heads of 128 and two kv heads, so that tensor parallelism of 2 fits."""
    make_byte_tokenizer(folder)
    architecture = Architecture(**{"num_hidden_layers": 1, "initializer_range": 0.05, "rope_theta": 100.0, **widths})
    config = hf.new_config(architecture, load_tokenizer(folder).eos_token_id, "fp32")
    shapes = {
        tensor.name: (tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols)
        for tensor in ModelGeometry.from_hf_config(config).tensors().values()
    }
    tensors = hf.random_tensors(config, shapes, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.dim() == 1:  # norms that are not all one, so that a forgotten one is noticed
            tensors[name] = 1 + 0.2 * torch.randn(tensor.shape, generator=generator)
    hf.write_checkpoint(folder, config, tensors, None)
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def edit_config(folder: Path, change: dict[str, Any]) -> None:
    """Overwrites fields of a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def random_sequences(count: int, seed: int, longest: int = 24) -> list[Sequence]:
    """Prompts and answers of different lengths. Advantages, old and reference log-probs are made up around those of a uniform
    guess, spread so far that some tokens are clipped on either side."""
    generator = torch.Generator().manual_seed(seed)
    ordinary = VOCABULARY - len(SPECIAL_TOKENS)

    def ids(length: int) -> list[int]:
        return torch.randint(0, ordinary, (length,), generator=generator).tolist()

    found = []
    for _ in range(count):
        prompt, answer = (int(torch.randint(2, longest, (), generator=generator)) for _ in range(2))
        sequence = Sequence(ids(prompt), ids(answer), advantage=float(torch.randn((), generator=generator)))
        uniform = -torch.log(torch.tensor(float(VOCABULARY)))
        sequence.old_logprobs = uniform + 0.3 * torch.randn(answer, generator=generator)
        sequence.reference_logprobs = uniform + 0.3 * torch.randn(answer, generator=generator)
        found.append(sequence)
    return found
