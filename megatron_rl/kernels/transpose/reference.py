"""The transposed bytes of a weight, by PyTorch."""

import torch
import torch.nn.functional as F

from megatron_rl.kernels import with_kernel


@with_kernel
def transpose_bytes(data: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Return one-byte `data` `[..., N, K]` transposed and contiguous, `[..., K, N + padding]`, with zeros in the padding."""
    transposed = data.view(torch.uint8).mT
    return (F.pad(transposed, (0, padding)) if padding else transposed).contiguous().view(data.dtype)
