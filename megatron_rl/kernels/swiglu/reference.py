"""SwiGLU in one pass: silu(gate) up, computed in FP32 and rounded once, like SGLang's GPU kernel (`activation.cuh`). On a CPU, where
engines also round silu(gate), models do not use it. The backward pass needs only gate and up.
"""

from typing import Any

import torch

from megatron_rl.kernels import with_kernel


def is_fused() -> bool:
    """Return whether models on this machine compute SwiGLU in one pass."""
    return torch.cuda.is_available()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) up `[..., F]` of x `[..., 2 F]`, gate first, with gradient."""
    return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return differentiate(x, gradient)


@with_kernel
def multiply(x: torch.Tensor) -> torch.Tensor:
    """Compute `swiglu` without gradient."""
    gate, up = x.float().chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up).to(x.dtype)


@with_kernel
def differentiate(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x `[..., 2 F]` for the gradient `[..., F]` of the result."""
    (gate, up), dy = x.float().chunk(2, -1), gradient.float()
    share = 1 / (1 + (-gate).exp())
    return torch.cat([dy * up * (share * (1 + gate * (1 - share))), dy * (gate * share)], -1).to(x.dtype)
