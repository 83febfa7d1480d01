"""The product of an adapter, scale * (x A^T) B^T: the same functions, and so the same bits on a CPU, in trainer and engine.

Each of the two products is rounded to x's dtype, then the scaled one; the sum with the layer's own result is the caller's. Where ranks
hold columns of A, x A^T is summed by the tree like the layer's own product (`kernels.sums.reference`).
"""

from __future__ import annotations

import torch

from megatron_rl.kernels.batch_invariant import invariant_matmul


def project_down(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return x A^T [..., rank] of x [..., K] and A [rank, K]."""
    return invariant_matmul(x, a)


def project_up(h: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale * h B^T [..., N] of h [..., rank] and B [N, rank]."""
    return invariant_matmul(h, b) * scale
