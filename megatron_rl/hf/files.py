"""Files of a Hugging Face checkpoint folder other than weights: config.json, the weights' index and the tokenizer. No torch."""

import json
from pathlib import Path
from typing import Any

from megatron_rl.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "generation_config.json")
"""Patterns of the files with the tokenizer and the generation defaults."""


def read_config(folder: Path, field: str = "model.path") -> dict[str, Any]:
    """Return config.json of a checkpoint folder. Raise UserError, naming `field`, if it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        rule, fix = "holds no config.json" if folder.is_dir() else "does not exist", "give a Hugging Face checkpoint folder"
        raise UserError(field, str(folder), rule, f"{fix}, or hf:OWNER/NAME for a model on the hub")
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(field, str(path), f"is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise UserError(field, str(path), "must be a JSON object")
    return config


def list_tokenizer_files(folder: Path) -> list[Path]:
    return sorted(file for name in TOKENIZER_FILES for file in folder.glob(name))


def read_index(folder: Path, field: str) -> dict[str, str]:
    """Return {tensor: file name}, or {} if there is no index. Raise UserError, naming `field`, for a damaged index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        index = json.loads(path.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(field, str(path), f"is not a safetensors index ({error!r})", "the file is damaged") from None
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise UserError(field, str(path), "is not a safetensors index", "`weight_map` must map tensor names to file names")
    return index
