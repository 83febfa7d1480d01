"""Checkpoints with names, shapes and dtypes but no values: files full of holes, which read as zeros and take no room on the disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel.model_geometry import ModelGeometry

_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4}


def write_sparse_safetensors(path: Path, tensors: Mapping[str, tuple[str, list[int]]]) -> None:
    """A safetensors file of `tensors`: name -> (dtype as safetensors calls it, shape)."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = _BYTES[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def list_tensors(config: dict[str, Any], dtype: str = "F32") -> dict[str, tuple[str, list[int]]]:
    """Every tensor of a config.json, all of one dtype."""
    tensors = ModelGeometry.from_hf_config(config).tensors().values()
    return {tensor.name: (dtype, [tensor.rows] if tensor.vector else [tensor.rows, tensor.cols]) for tensor in tensors}
