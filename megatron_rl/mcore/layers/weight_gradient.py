"""The gradient of a weight whose product is not autograd's."""

from __future__ import annotations

from typing import Any

import torch


class WeightGradient:
    """Adds up the gradient of a weight in FP32 in Megatron's buffer where there is one (its fused-accumulation protocol)."""

    def __init__(self, weight: Any) -> None:
        self._weight, self._has_buffer = weight, hasattr(weight, "main_grad")
        self._sum = weight.main_grad if self._has_buffer else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Add dy^T . x, dy [T, N] and x [T, K]."""
        if self._sum.dtype == dy.dtype:
            self._sum.addmm_(dy.t(), x)
        elif dy.is_cuda and self._sum.dtype == torch.float32:  # FP32 sums straight into the buffer
            torch.addmm(self._sum, dy.t(), x, out_dtype=torch.float32, out=self._sum)
        else:
            self._sum += dy.t() @ x

    def finish(self) -> torch.Tensor:
        """Return what autograd gets."""
        if not self._has_buffer:
            return self._sum.to(self._weight.dtype)
        self._weight.grad_added_to_main_grad = True
        # DDP's hook drops it, or adds it where an embedding has the same weight
        return (torch.zeros_like if getattr(self._weight, "zero_out_wgrad", False) else torch.empty_like)(self._weight)
