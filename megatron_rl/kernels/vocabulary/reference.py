"""Softmax over a sharded vocabulary: on a GPU, one pass over the logits forward and one backward.

Each rank summarizes its part of a row of logits x, divided by the temperature, in four numbers:

    m = max x        s = sum e^(x - m)        w = sum (x - m) e^(x - m)        x at the target, or 0 if another rank holds it

`combine` computes log-prob, log sum e^x and entropy = log s - w / s of the whole vocabulary from them. All numbers are FP32; logits and
their gradients are rounded to the dtype of the logits, as separate operators round.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.sums import reference as tree


class RowScores(NamedTuple):
    """Scores of each row, float32 `[n]`."""

    logprobs: torch.Tensor
    log_sums: torch.Tensor  # logarithm of the sum of the exponentials
    entropies: torch.Tensor


@with_kernel
def summarize(logits: torch.Tensor, columns: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return m, s, w and the logit of the target, float32 `[n, 4]`, for contiguous logits `[n, v]`. `columns` int64 `[n]` are the columns
    of the targets, out of range if another rank holds the target."""
    scaled = logits.float() / temperature
    largest = scaled.amax(-1, keepdim=True)
    shifted = scaled - largest
    weights = shifted.exp()
    here = (columns >= 0) & (columns < logits.shape[-1])
    at_target = scaled.gather(-1, (columns * here).unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    return torch.stack([largest.squeeze(-1), weights.sum(-1), (shifted * weights).sum(-1), at_target], -1)


@with_kernel
def differentiate_(logits: torch.Tensor, columns: torch.Tensor, log_sums: torch.Tensor, gradient: torch.Tensor, temperature: float) -> None:
    """Replace contiguous logits `[n, v]` by their gradient (one-hot - softmax) / temperature * gradient; log_sums and gradient float32
    `[n]`."""
    scaled, here = gradient / temperature, (columns >= 0) & (columns < logits.shape[-1])
    of_logits = (logits.float() / temperature - log_sums.unsqueeze(-1)).exp_().mul_(-scaled.unsqueeze(-1))
    logits.copy_(of_logits.scatter_add_(-1, (columns * here).unsqueeze(-1), (scaled * here).unsqueeze(-1)))


def combine(parts: Sequence[torch.Tensor]) -> RowScores:
    """Return the scores of rows over the whole vocabulary, given the summaries float32 `[n, 4]` of each rank in order."""
    largest = torch.stack([part[:, 0] for part in parts]).amax(0)
    terms = []
    for m, s, w, x in (part.unbind(-1) for part in parts):
        factor = (m - largest).exp()
        terms.append(torch.stack([factor * s, factor * (w + s * (m - largest)), x], -1))
    s, w, x = tree.add(terms).unbind(-1)
    logarithms = s.log()
    return RowScores((x - largest) - logarithms, largest + logarithms, logarithms - w / s)
