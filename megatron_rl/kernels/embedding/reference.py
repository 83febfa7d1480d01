"""The gradient of an embedding, added to the rows of tokens that occur: the others, nearly all of a large vocabulary, are not touched."""

import torch

from megatron_rl.kernels import with_kernel


@with_kernel
def add_token_rows(sums: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the rows `[t, h]` of tokens int64 `[t]` to the contiguous float32 `sums` `[v, h]`. Rows of one token are added up first, in order
    and in float32. Tokens out of range, which another rank holds, are left out."""
    here = (tokens >= 0) & (tokens < len(sums))
    own, places = tokens[here].unique(return_inverse=True)
    sums[own] += sums.new_zeros(len(own), sums.shape[1]).index_add_(0, places, rows[here].float())
