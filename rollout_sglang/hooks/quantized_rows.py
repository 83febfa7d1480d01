"""Norms and SwiGLU of an engine on Hopper that also quantize their result, in one launch, for the FP8 layer that reads it.

The quantized rows are an attribute of the result, which SGLang passes on as it is. They have the bits that the layer's own quantizer would
compute, and an operator that reads the result itself, such as a recorder or an adapter, finds it.
"""

from collections.abc import Callable
from typing import Any

import torch

from parallel.formats import BLOCK
from rollout_sglang.hooks import blackwell
from rollout_sglang.hooks.gpu_activation_quant import get_scale_format
from rollout_sglang.hooks.rank_kernels import FP8_FUNCTION

_ROWS, _MARK = "megatron_rl_rows", "megatron_rl_quantizes"


def load_model(original: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    """Wrap `ModelRunner.load_model`: mark the operators whose result goes to an FP8 layer and nowhere else."""
    result = original(self, *args, **named)
    for layer in getattr(getattr(self.model, "model", None), "layers", ()):
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        for operator, linear in (
            (getattr(layer, "input_layernorm", None), getattr(attention, "qkv_proj", None)),
            (getattr(layer, "post_attention_layernorm", None), getattr(mlp, "gate_up_proj", None)),
            (getattr(mlp, "act_fn", None), getattr(mlp, "down_proj", None)),
        ):
            if operator is not None and takes_rows(linear):
                for module in (operator, linear):
                    setattr(module, _MARK, True)
    return result


def takes_rows(linear: Any) -> bool:
    """Return whether a live layer reads quantized rows: DeepGEMM's product in BF16, for shapes for which SGLang does not leave it."""
    method = getattr(linear, "quant_method", None)
    function = getattr(method, "w8a8_block_fp8_linear", None)
    if getattr(getattr(function, "func", function), "__name__", "") != FP8_FUNCTION or blackwell.is_blackwell():
        return False
    rows, columns = linear.weight.shape
    return bool(linear.orig_dtype == torch.bfloat16 and rows % 64 == 0 and columns % BLOCK == 0)


def quantizes(operator: Any, x: torch.Tensor) -> bool:
    """Return whether a marked operator quantizes its result for x."""
    return getattr(operator, _MARK, False) and x.dtype == torch.bfloat16 and x.dim() == 2 and len(x) > 0


def normalize(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (total, norm with its rows) of `kernels.norm.reference`."""
    from megatron_rl.kernels.norm.triton import quantize_norm

    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total, _, rows, _ = quantize_norm(x, residual, weight, eps, get_scale_format(), columns=False, result=normed)
    setattr(normed, _ROWS, rows)
    return total, normed


def multiply_by_gate(x: torch.Tensor) -> torch.Tensor:
    """Return SwiGLU of x with its rows."""
    from megatron_rl.kernels.swiglu.triton import multiply_and_quantize

    result, rows = multiply_and_quantize(x, get_scale_format())
    setattr(result, _ROWS, rows)
    return result


def take_rows(x: Any) -> Any:
    """Return the quantized rows (data, scales) of x if it has them, otherwise x."""
    return getattr(x, _ROWS, x)


def apply_linear(original: Callable[..., Any], self: Any, layer: Any, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Wrap `Fp8LinearMethod.apply`."""
    result: torch.Tensor = original(self, layer, take_rows(x) if getattr(layer, _MARK, False) else x, bias)
    return result
