"""The emulated FP8 products on any device: quantize, dequantize, multiply in FP32. The reference for every other backend.

With power-of-two scales a dequantized product is exact before accumulation, so this differs from a block-scaled GEMM only in the
order of FP32 sums. The engine's CPU kernel calls `fprop` too: on a CPU both sides run this function.
"""

from __future__ import annotations

import torch

from megatron_rl.precision.fp8 import round_trip_1x128, round_trip_128x1
from megatron_rl.precision.ops.batch_invariant import invariant_matmul


def value_dtype(x: torch.Tensor, scale_format: str) -> torch.dtype:
    """Return the dtype of weight values to multiply x with: float32, or bf16 where that is exact and several times faster on a CPU.

    E4M3 values times powers of two are exact in bf16, products are summed in FP32, and the result is rounded to bf16 anyway.
    """
    exact = scale_format == "pow2" and x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return torch.bfloat16 if exact else torch.float32


def fprop(x: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(x) . W^T. x [..., K] in any float dtype, weight [N, K] dequantized blocks in `value_dtype` or float32;
    returns [..., N] in x's dtype."""
    return invariant_matmul(round_trip_1x128(x, scale_format).to(weight.dtype), weight).to(x.dtype)


def dgrad(dy: torch.Tensor, weight: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(dy) . W with the same blocks as `fprop`. dy [..., N], returns [..., K] in dy's dtype."""
    return (round_trip_1x128(dy, scale_format).to(weight.dtype) @ weight).to(dy.dtype)


def wgrad(dy: torch.Tensor, x: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Return Q_1x128(dy^T) . Q_128x1(x), both quantized along the tokens. dy [T, N], x [T, K]; returns float32 [N, K]."""
    return round_trip_128x1(dy, scale_format).t() @ round_trip_128x1(x, scale_format)
