"""The emulated FP8 products on any device: quantize, dequantize, multiply in FP32. The reference for every other backend.

With power-of-two scales a dequantized product is exact before accumulation, so this differs from a block-scaled GEMM only in the
order of FP32 sums. The operands are BF16 numbers then, which a CPU with AMX multiplies several times faster. The engine's CPU kernel
calls `fprop` too: on a CPU both sides run this function.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_rl.kernels.batch_invariant import bf16_operands, invariant_matmul
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import round_trip_1x128, round_trip_128x1


def value_dtype(x: torch.Tensor, scale_format: str) -> torch.dtype:
    """Return the dtype of weight values to multiply x with: float32, or bf16 where that is exact and several times faster on a CPU.

    E4M3 values times powers of two are exact in bf16, products are summed in FP32, and the result is rounded to bf16 anyway.
    """
    exact = scale_format == "pow2" and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return torch.bfloat16 if exact else torch.float32


def fprop(x: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(x) . W^T. x [..., K] in any float dtype, weight [N, K] dequantized blocks in `value_dtype` or float32;
    returns [..., N] in x's dtype."""
    values = round_trip_1x128(x, scale_format).to(weight.dtype)
    with _exact_operands(values, weight.shape[0], scale_format):
        return invariant_matmul(values, weight).to(x.dtype)


def fprop_by_tree(x: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return the sum of `fprop` float32 [..., N], neither rounded nor added up over ranks, by the tree of `kernels.sums.reference`."""
    values = round_trip_1x128(x, scale_format).float()
    with _exact_operands(values, weight.shape[0], scale_format):
        return tree.multiply(values, weight)


def dgrad(dy: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(dy) . W with the same blocks as `fprop`. dy [..., N], returns [..., K] in dy's dtype."""
    values = round_trip_1x128(dy, scale_format).to(weight.dtype)
    with _exact_operands(values, weight.shape[1], scale_format):
        return (values @ weight).to(dy.dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(dy^T) . Q_128x1(x), both quantized along the tokens. dy [T, N], x [T, K]; returns float32 [N, K]."""
    dy_values, x_values = round_trip_128x1(dy, scale_format), round_trip_128x1(x, scale_format)
    with _exact_operands(x_values, x.shape[1], scale_format):
        return dy_values.t() @ x_values


def _exact_operands(values: torch.Tensor, columns: int, scale_format: str) -> AbstractContextManager[None]:
    """Return the context to multiply quantized values in: E4M3 values times powers of two are BF16 numbers."""
    return bf16_operands(columns) if scale_format == "pow2" and values.dtype == torch.float32 and not values.is_cuda else nullcontext()
