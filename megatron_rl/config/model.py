"""The section `[model]`: the policy. Imports without torch."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.base import ConfigSection


class ModelConfig(ConfigSection):
    """The policy to train."""

    path: Path
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer)."""
