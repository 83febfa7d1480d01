"""Weight gradients that are added directly to Megatron's FP32 buffer.

With two concurrent micro-batches (`mcore.base.two_batch`), a weight has two gradients in one backward pass. Autograd would add them in
the weight's dtype. Instead, each is added to the buffer, and autograd receives none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.kernels.embedding.reference import add_token_rows
from megatron_rl.mcore.base import two_batch


class WeightGradient:
    """Accumulates a weight's gradient in FP32, in Megatron's buffer if there is one (its fused-accumulation protocol)."""

    def __init__(self, weight: Any) -> None:
        self._weight, self._has_buffer = weight, hasattr(weight, "main_grad")
        self._sum = weight.main_grad if self._has_buffer else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Add dy^T . x for dy [T, N] and x [T, K]."""
        add_product(x, dy, self._sum)

    def add_rows(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the rows [t, K] of tokens int64 [t] of an embedding; tokens out of range are left out."""
        add_token_rows(self._sum, tokens, rows)

    def finish(self) -> torch.Tensor | None:
        """Return the gradient for autograd."""
        return hand_over_gradient(self._weight) if self._has_buffer else self._sum.to(self._weight.dtype)


def add_product(x: torch.Tensor, dy: torch.Tensor, total: torch.Tensor) -> None:
    """Add dy^T . x to `total` [N, K], for dy [T, N] and x [T, K]. On a GPU, FP32 sums are added within the product."""
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    elif dy.is_cuda and total.dtype == torch.float32:
        torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)
    else:
        total += dy.t() @ x


def hand_over_gradient(weight: Any) -> torch.Tensor | None:
    """Tell Megatron that a gradient is in its FP32 buffer; return the gradient for autograd. This is None, or zeros if an embedding shares
    the weight: DDP's hook then adds autograd's gradient to the buffer."""
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return weight.new_zeros(()).expand_as(weight)
    weight.grad = weight.new_empty(()).expand_as(weight)  # DDP's hook requires a gradient and drops it; this one needs no memory
    return None


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is not None:  # otherwise the product has added it
            ctx.weight.main_grad.add_(gradient)
        return hand_over_gradient(ctx.weight)


def take_weight(weight: Any) -> Any:
    """Return a weight for autograd's operators that keeps the gradients of concurrent micro-batches apart."""
    if weight is None or not two_batch.is_under_way() or not torch.is_grad_enabled() or not weight.requires_grad:
        return weight
    return _AddGradient.apply(weight)


def multiply(product: Callable[..., torch.Tensor], x: torch.Tensor, weight: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Return Megatron's `product` of x and a weight. On a GPU, the product of the gradient adds it to Megatron's buffer; elsewhere, an
    operator of its own does, and the gradient is rounded to the weight's dtype before."""
    in_place = on_gpu(x) and hasattr(weight, "main_grad") and weight.requires_grad and torch.is_grad_enabled()
    taken = _AddGradient.apply(weight) if in_place else take_weight(weight)
    if in_place:
        taken.main_grad = weight.main_grad
    return product(x, taken, *args, **options | {"gradient_accumulation_fusion": in_place})


def on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


@contextmanager
def take_weights(module: torch.nn.Module) -> Iterator[None]:
    """Context manager: the module's own weights are replaced by `take_weight`. No turn may be given inside."""
    taken = {name: take_weight(weight) for name, weight in module._parameters.items()} if two_batch.is_under_way() else {}
    vars(module).update(taken)  # attributes are found before parameters
    try:
        yield
    finally:
        for name in taken:
            del vars(module)[name]
