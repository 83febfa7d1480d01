"""Hugging Face transformers as the second opinion, in a process that never saw Megatron's CPU patches."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def logits(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    """float32 [b, s, vocab] of the checkpoint computed in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True)
    with torch.no_grad():
        return model(torch.tensor(ids)).logits
