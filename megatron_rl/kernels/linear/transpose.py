"""Transposes the bytes of a weight. A version of the weights needs it once, so the rehearsal does not count it in each micro-batch."""

import torch
import torch.nn.functional as F


def transpose_bytes(data: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Return one-byte `data` `[..., N, K]` transposed and contiguous, `[..., K, N + padding]`, with zeros in the padding."""
    transposed = data.view(torch.uint8).mT
    return (F.pad(transposed, (0, padding)) if padding else transposed).contiguous().view(data.dtype)
