"""Checkpoints with a layer for multi-token prediction, and copies of it that ranks make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_rl.hf.files import read_config
from megatron_rl.precision.contract import QUANTIZED_ROLES
from parallel.formats import FP8
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors
from parallel.shards import FP32_ROLES
from support.fp8_checkpoints import random_blocks
from support.models import edit_config, read_weights


def add_mtp_layer(folder: Path, scales: str = "", seed: int = 7, layers: int = 1) -> dict[str, torch.Tensor]:
    """Add layers as DeepSeek and GLM publish it: random numbers in BF16, or the decoder's weights as random FP8 blocks with `scales`.
    Return its tensors."""
    config = read_config(folder) | {"num_nextn_predict_layers": layers}
    model, generator = ModelGeometry.from_hf_config(config), torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in list_mtp_tensors(model).items():
        if scales and tensor.role in QUANTIZED_ROLES:
            tensors[name], tensors[FP8.scale_name(name)] = random_blocks(tensor.rows, tensor.cols, scales, generator)
        else:
            value = torch.randn((tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols), generator=generator) / 50
            tensors[name] = value if tensor.role in FP32_ROLES else value.bfloat16()
    save_file(read_weights(folder) | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, {"num_nextn_predict_layers": layers})
    return tensors


def find_changed(tensors: dict[str, torch.Tensor], others: dict[str, Any]) -> list[str]:
    """Names of `tensors` that are not in `others` byte for byte."""

    def same(a: torch.Tensor, b: torch.Tensor | None) -> bool:
        return b is not None and (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    return [name for name, tensor in tensors.items() if not same(tensor, others.get(name))]
