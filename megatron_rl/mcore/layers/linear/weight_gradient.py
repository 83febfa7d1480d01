"""The gradient of a weight that is added to Megatron's FP32 buffer where it is computed.

Where two micro-batches take turns (`mcore.passes.two_batch`) a weight has two gradients in one backward pass. Autograd would add them up in the
weight's dtype; so each is added to the buffer by itself, and autograd gets none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.mcore.passes import two_batch


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

    def finish(self) -> torch.Tensor | None:
        """Return what autograd gets."""
        return hand_over_gradient(self._weight) if self._has_buffer else self._sum.to(self._weight.dtype)


def hand_over_gradient(weight: Any) -> torch.Tensor | None:
    """Tell Megatron that a gradient is in its FP32 buffer. Return what autograd is to have in its place: zeros where an embedding has the
    same weight, since DDP's hook then adds what autograd gets; else nothing."""
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return weight.new_zeros(()).expand_as(weight)
    weight.grad = weight.new_empty(()).expand_as(weight)  # DDP's hook wants one, and drops it: it takes no memory
    return None


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        ctx.weight.main_grad.add_(gradient)
        return hand_over_gradient(ctx.weight)


def take_weight(weight: Any) -> Any:
    """Return a weight for autograd's own operators, to be used by the micro-batch whose turn it is."""
    if weight is None or not two_batch.is_under_way() or not torch.is_grad_enabled() or not weight.requires_grad:
        return weight
    return _AddGradient.apply(weight)


@contextmanager
def take_weights(module: torch.nn.Module) -> Iterator[None]:
    """Within the context a module's own weights are what `take_weight` returns; no turn must be given in it."""
    taken = {name: take_weight(weight) for name, weight in module._parameters.items()} if two_batch.is_under_way() else {}
    vars(module).update(taken)  # found before the parameters
    try:
        yield
    finally:
        for name in taken:
            del vars(module)[name]
