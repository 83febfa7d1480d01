"""SGLang's INT8 linear layer (`W8A8Int8LinearMethod`): its product on a CPU, and the layout of its weights."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.precision.int8 import int8_matmul
from rollout_sglang.hooks.dequant_cache import get_float_weight


def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Replace SGLang's `apply`, same arguments. Return [..., N] of x [..., K]."""
    y = int8_matmul(x, get_float_weight(layer.weight, layer.weight.float), layer.weight_scale)
    return y if bias is None else y + bias


def keep_layout(self: Any, layer: Any) -> None:
    """Replace SGLang's `process_weights_after_loading`, which transposes the weight at every call: after loading the checkpoint, and again
    at the end of every sync. Transpose it once, and only on a GPU, whose kernel needs that; on a CPU, where SGLang supports only AMX, keep
    [N, K]."""
    weight = layer.weight.detach()
    transposed = weight.t() if weight.is_cuda and weight.is_contiguous() else weight
    layer.weight = torch.nn.Parameter(transposed, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(layer.weight_scale.detach(), requires_grad=False)
