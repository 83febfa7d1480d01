"""The files of a Hugging Face checkpoint folder that are not weights: config.json and the tokenizer. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a Hugging Face checkpoint. Raise UserError when it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError("model.path", str(folder), "holds no config.json", "give a Hugging Face checkpoint folder")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError("model.path", str(path), f"is no valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError("model.path", str(path), "must be a JSON object")
    return config


def list_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint folder that belong to its tokenizer and generation defaults."""
    names = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "generation_config.json")
    return sorted(file for name in names for file in folder.glob(name))
