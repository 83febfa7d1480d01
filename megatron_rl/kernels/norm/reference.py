"""RMSNorm of the residual stream fused with the preceding addition, and its gradient fused with the gradient of the stream.

    total = x + residual        statistic = 1 / sqrt(mean(total^2) + eps)        normed = (total statistic) weight

All in FP32; `total` and `normed` are rounded to the dtype of x, as two separate operators round. Backends quantize `normed` as they compute
it (`NormBackend.quantize_norm`). The backward pass needs `total` and `statistic`.
"""

from typing import Any

import torch

from megatron_rl.kernels import with_kernel


@with_kernel
def normalize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (total `[..., h]`, statistic float32 `[...]`, normed `[..., h]`) of x `[..., h]`. Without a residual, the total is x, which
    may be heads in a wider tensor."""
    total = x if residual is None else x + residual
    values = total.float()
    statistic = torch.rsqrt(values.square().mean(-1) + eps)
    return total, statistic, (values * statistic.unsqueeze(-1) * weight.float()).to(x.dtype)


@with_kernel
def differentiate(
    gradient: torch.Tensor, total: torch.Tensor, statistic: torch.Tensor, weight: torch.Tensor, of_total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (gradient of x and residual `[..., h]`, gradient of the weight `[h]`).

    Args:
        gradient: Gradient of `normed`. Its contribution is rounded before `of_total` is added, as in autograd.
        of_total: Gradient of `total`, or None.
    """
    dy, scale = gradient.float(), statistic.unsqueeze(-1)
    normalized = total.float() * scale
    weighted = dy * weight.float()
    dx = (scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))).to(total.dtype)
    return dx if of_total is None else dx + of_total, (dy * normalized).flatten(0, -2).sum(0).to(weight.dtype)


class Norm(torch.autograd.Function):
    """Returns (x + residual, its norm). If `residual` is None, x is the stream and the sum is None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        total, statistic, normed = normalize(x, residual, weight, eps)
        ctx.save_for_backward(total, statistic, weight)
        ctx.set_materialize_grads(False)
        return None if residual is None else total, normed

    @staticmethod
    def backward(ctx: Any, of_total: torch.Tensor | None, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return *differentiate_sum(ctx, of_total, gradient), None


def differentiate_sum(ctx: Any, of_total: torch.Tensor | None, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, the residual, and the weight, the first three inputs of an autograd function that saved (total, statistic,
    weight), for those of the sum and of its norm."""
    if gradient is None:
        return of_total, of_total if ctx.needs_input_grad[1] else None, None
    total, statistic, weight = ctx.saved_tensors
    dx, dw = differentiate(gradient, total, statistic, weight, of_total)
    return dx, dx if ctx.needs_input_grad[1] else None, dw if ctx.needs_input_grad[2] else None
