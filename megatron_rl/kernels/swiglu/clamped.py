"""SwiGLU of gpt-oss's experts, for CPUs: rows of gate and up alternate, and both are clamped."""

from typing import Any

import torch

from megatron_rl.kernels.batch_invariant import sigmoid

ALPHA = 1.702


def clamped_swiglu(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Return g sigmoid(1.702 g) (u + 1) `[..., F]` with g = min(gate, limit) and u = up clamped to +-limit, of x `[..., 2 F]`, in which
    gates have even and ups odd numbers. Computed in FP32 and rounded once; with gradient."""
    return _ClampedSwiGLU.apply(x, limit)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        gate, up = _clamp(x, limit)
        return (gate * sigmoid(gate * ALPHA) * (up + 1)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        (gate, up), dy = _clamp(x, ctx.limit), gradient.float()
        share = torch.sigmoid(gate * ALPHA)
        of_gate = dy * (up + 1) * share * (1 + ALPHA * gate * (1 - share))
        result = torch.stack([of_gate, dy * gate * share], -1).flatten(-2)
        result[..., ::2].masked_fill_(x[..., ::2] > ctx.limit, 0)
        result[..., 1::2].masked_fill_(x[..., 1::2].abs() > ctx.limit, 0)
        return result.to(x.dtype), None


def _clamp(x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x[..., ::2].float().clamp(max=limit), x[..., 1::2].float().clamp(-limit, limit)
