"""RMSNorm of the residual stream together with the sum before it, and its gradient together with the stream's.

    total = x + residual        statistic = 1 / sqrt(mean(total^2) + eps)        normed = (total statistic) weight

all in FP32; `total` and `normed` are rounded to the dtype of x, as two operators one after the other round. Back ends quantize `normed` as
they compute it (`Backend.quantize_norm`). For the backward pass `total` and `statistic` are kept.
"""

from __future__ import annotations

import torch


def normalize_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (total [..., h], statistic float32 [...], normed [..., h]) of x [..., h], the total where there is no residual."""
    total = x if residual is None else x + residual
    values = total.float()
    statistic = torch.rsqrt(values.square().mean(-1) + eps)
    return total, statistic, (values * statistic.unsqueeze(-1) * weight.float()).to(x.dtype)


def differentiate_norm(
    gradient: torch.Tensor, total: torch.Tensor, statistic: torch.Tensor, weight: torch.Tensor, of_total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the gradient of x and residual [..., h], that of the weight [h]) for the gradients of `normed` and of `total`, if it has one.
    The norm's share is rounded before `of_total` is added to it, as autograd would."""
    if gradient.is_cuda:
        from megatron_rl.kernels.norm.triton import differentiate

        return differentiate(gradient, total, statistic, weight, of_total)
    return differentiate_reference(gradient, total, statistic, weight, of_total)


def differentiate_reference(
    gradient: torch.Tensor, total: torch.Tensor, statistic: torch.Tensor, weight: torch.Tensor, of_total: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernel does, on any device."""
    dy, scale = gradient.float(), statistic.unsqueeze(-1)
    normalized = total.float() * scale
    weighted = dy * weight.float()
    dx = (scale * (weighted - normalized * (weighted * normalized).mean(-1, keepdim=True))).to(total.dtype)
    return dx if of_total is None else dx + of_total, (dy * normalized).flatten(0, -2).sum(0).to(weight.dtype)
