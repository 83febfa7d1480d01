"""Softmax over a sharded vocabulary: on a GPU, one pass over the logits forward and one backward.

A part of a row of logits x, divided by the temperature, is summarized in four numbers:

    m = max x        s = sum e^(x - m)        w = sum (x - m) e^(x - m)        x at the target, or 0 if another rank holds it

`combine` computes log-prob, log sum e^x and entropy = log s - w / s of the whole vocabulary from them. All numbers are FP32; logits and
their gradients are rounded to the dtype of the logits, as separate operators round. The number of parts belongs to the vocabulary
(`count_parts`), so up to eight ranks, of the trainer or of the engine, add in one order.
"""

import math
from typing import NamedTuple

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.sums import reference as tree

PARTS = 8


def count_parts(vocabulary: int, ranks: int) -> int:
    """Return into how many parts each of `ranks` ranks cuts its logits."""
    return max(math.gcd(vocabulary, PARTS) // ranks, 1)


class RowScores(NamedTuple):
    """Scores of each row, float32 `[n]`."""

    logprobs: torch.Tensor
    log_sums: torch.Tensor  # logarithm of the sum of the exponentials
    entropies: torch.Tensor


@with_kernel
def summarize(logits: torch.Tensor, columns: torch.Tensor, temperature: float, parts: int = 1) -> torch.Tensor:
    """Return m, s, w and the logit of the target, float32 `[parts, n, 4]`, for contiguous logits `[n, v]` cut into equal parts. `columns`
    int64 `[n]` are the columns of the targets, out of range if another rank holds the target. Logits of -inf, though not of the target,
    have no weight."""
    here = (columns >= 0) & (columns < logits.shape[-1])
    scaled = logits.float() / temperature
    at_target = scaled.gather(-1, (columns * here).unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    scaled = scaled.unflatten(-1, (parts, -1))
    largest = scaled.amax(-1, keepdim=True).clamp(min=-1e38)
    shifted = scaled - largest
    weights = shifted.exp()
    moments = (shifted * weights).masked_fill(weights == 0, 0.0).sum(-1)
    owner = (columns // scaled.shape[-1]).unsqueeze(-1) == torch.arange(parts, device=columns.device)
    return torch.stack([largest.squeeze(-1), weights.sum(-1), moments, at_target.unsqueeze(-1) * owner], -1).transpose(0, 1)


@with_kernel
def differentiate_(logits: torch.Tensor, columns: torch.Tensor, log_sums: torch.Tensor, gradient: torch.Tensor, temperature: float) -> None:
    """Replace contiguous logits `[n, v]` by their gradient (one-hot - softmax) / temperature * gradient; log_sums and gradient float32
    `[n]`."""
    scaled, here = gradient / temperature, (columns >= 0) & (columns < logits.shape[-1])
    of_logits = (logits.float() / temperature - log_sums.unsqueeze(-1)).exp_().mul_(-scaled.unsqueeze(-1))
    logits.copy_(of_logits.scatter_add_(-1, (columns * here).unsqueeze(-1), (scaled * here).unsqueeze(-1)))


def combine(parts: torch.Tensor) -> RowScores:
    """Return the scores of rows over the whole vocabulary, given the summaries float32 `[parts, n, 4]` of all parts in order."""
    m, s, w, x = parts.unbind(-1)
    largest = m.amax(0)
    factor = (m - largest).exp()
    s, w, x = tree.add(torch.stack([factor * s, factor * (w + s * (m - largest)), x], -1).unbind()).unbind(-1)
    logarithms = s.log()
    return RowScores((x - largest) - logarithms, largest + logarithms, logarithms - w / s)
