"""Gates: the gated norm of gated delta nets, and x sigmoid(z) of attention and shared experts, in float32 and rounded once."""

import torch
import torch.nn.functional as F

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.batch_invariant import sigmoid
from megatron_rl.precision.threads import single_threaded


@with_kernel
def gate_norm(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rms_norm(x) weight silu(z) `[..., v_dim]`, computed in float32 and rounded once, with gradient. `weight` is `[v_dim]`."""
    z = z.float()
    with single_threaded():
        normed = F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return (normed * (z * sigmoid(z))).to(x.dtype)


@with_kernel
def gate(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return x sigmoid(z) `[..., n]`, computed in float32 and rounded once, with gradient. `z` is `[..., n]` or `[..., 1]`."""
    return (x.float() * sigmoid(z.float())).to(x.dtype)
