"""RMSNorm of the residual stream fused with the preceding addition, and its gradient fused with the gradient of the stream.

    total = x + residual        statistic = 1 / sqrt(mean(total^2) + eps)        normed = (total statistic) weight

All in FP32; `total` and `normed` are rounded to the dtype of x, as two separate operators round. Backends quantize `normed` as they compute
it (`NormBackend.quantize_norm`). The backward pass needs `total` and `statistic`.
"""

import torch

from megatron_rl.kernels import with_kernel


def normalize_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (total `[..., h]`, statistic float32 `[...]`, normed `[..., h]`) of x `[..., h]`. Without a residual, the total is x."""
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
