"""The gradient of the gated delta rule in products of matrices, one span of `SPAN` tokens after another, on a CPU.

The forward pass runs token by token and keeps e and the state before each span, S. In a span, d = beta e is known, so no states between its
tokens are needed. G[t, s] is the product of the decays of the tokens after s up to t, for t >= s, otherwise 0; g[t] that from the span's
start, h[t] that from t to its end; S' is the gradient of the state behind the span; rows of Q, K, V, O and d are tokens.

    (I + U) dd = (G * Q K^T)^T dO + h * K S'         U[t, s] = beta[s] G[s, t] k[s].k[t] for s > t          the gradient of d; dV = beta dd
    dS = g[last] S' + (g * Q)^T dO - (g * K)^T dV                                                           that of S, for the span before
    dQ = g * dO S^T + (G * dO d^T) K
    dK = h * d S'^T - g * dV S^T + (G * dO d^T)^T Q - (E + E^T) K      E = G * dV d^T below the diagonal    dbeta = e.dd
    decay[t] ddecay[t] = the sum of what passes from tokens (or S) before t to tokens from t on (or S')

The last line adds M[i, j] = (G * dO d^T * Q K^T - E * K K^T)[i, j] for i >= t > j, and their like with S and S'. Each summand has the
decays that it crosses, so no difference of large sums occurs if a state decays to nothing, and nothing is divided by a product of decays.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from parallel.attention.gated_delta_net import SPAN


class Spans(NamedTuple):
    """Spans of packed sequences, in the order of the row; int64."""

    firsts: torch.Tensor  # [n]: the number of each sequence's first span
    counts: torch.Tensor  # [n]
    tokens: torch.Tensor  # [spans, width]: the tokens of each span, or the row's length behind its last one; no span has more than width


@functools.lru_cache(16)
def find_spans(lengths: tuple[int, ...]) -> Spans:
    """Return the spans of sequences of `lengths` tokens."""
    size, place = torch.tensor(lengths, dtype=torch.int64), torch.arange(min(SPAN, max((1, *lengths))))
    counts = -(-size // SPAN)
    firsts = counts.cumsum(0) - counts
    first = (torch.arange(int(counts.sum())) - firsts.repeat_interleave(counts))[:, None] * SPAN + place
    starts = torch.tensor(list(accumulate(lengths, initial=0))[:-1], dtype=torch.int64)
    tokens = torch.where(first < size.repeat_interleave(counts)[:, None], first + starts.repeat_interleave(counts)[:, None], sum(lengths))
    return Spans(firsts, counts, tokens)


def differentiate(
    inputs: Sequence[torch.Tensor], lengths: tuple[int, ...], errors: torch.Tensor, states: torch.Tensor, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of q, k, v, decay, and beta.

    Args:
        inputs: q, k, decay, and beta, as in `scan.Inputs`.
        errors: e, float32 `[t, heads, v_dim]`.
        states: States before spans, float32 `[spans, heads, k_dim, v_dim]`.
        gradient: Gradient of the outputs, as `errors`.
    """
    spans, sizes = find_spans(lengths), (0.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    padded = (torch.cat([x, x.new_full((1, *x.shape[1:]), size)]) for x, size in zip((*inputs, errors, gradient), sizes, strict=True))
    q, k, decay, beta, e, dy = (x[spans.tokens].transpose(1, 2) for x in padded)  # [spans, heads, width, ...]
    beta, width = beta.unsqueeze(-1), spans.tokens.shape[1]
    later = torch.ones(width, width, dtype=torch.bool).triu(1)
    ratio = torch.where(later, decay.unsqueeze(-2), 1.0).cumprod(-1).triu()  # G^T
    start, end, queried, known = decay.cumprod(-1).unsqueeze(-1), ratio[..., -1:], k @ q.mT, k @ k.mT
    last = start[..., -1:, :]
    right = torch.cat([(ratio * queried) @ dy, end * k], -1)
    solved = torch.linalg.solve_triangular((ratio * known).triu(1) * beta.mT, right, upper=True, unitriangular=True)
    of_delta, passed = solved.split([dy.shape[-1], k.shape[-1]], -1)
    of_after = _carry(spans, (start * q).mT, (start * beta * k).mT, last, dy, of_delta, passed)
    delta, of_v = beta * e, beta * of_delta
    kept = ratio * (delta @ dy.mT)  # (G * dO d^T)^T
    lost = (ratio * (delta @ of_v.mT)).triu(1)
    from_start = start * (dy @ states.mT), start * (of_v @ states.mT)
    to_end = end * (delta @ of_after.mT)
    of_q = from_start[0] + kept.mT @ k
    of_k = to_end - from_start[1] + kept @ q - (lost + lost.mT) @ k
    crossing = (kept * queried - lost * known).triu(1)  # M^T
    reached = crossing.flip(-1).cumsum(-1).flip(-1).triu(1).sum(-2)  # for each t, over j < t <= i
    reached += (from_start[0] * q - from_start[1] * k).sum(-1).flip(-1).cumsum(-1).flip(-1)
    sent = (to_end * k).sum(-1).cumsum(-1)
    reached[..., 1:] += sent[..., :-1]
    reached += (last * of_after * states).sum((-2, -1)).unsqueeze(-1)
    of_decay = reached / decay.clamp(min=torch.finfo(decay.dtype).tiny)
    found = of_q, of_k, of_v, of_decay, (e * of_delta).sum(-1)
    places = spans.tokens < len(gradient)
    return [x.transpose(1, 2)[places] for x in found]


def _carry(
    spans: Spans, queries: torch.Tensor, keys: torch.Tensor, last: torch.Tensor, dy: torch.Tensor, of_delta: torch.Tensor,
    passed: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the gradients of the states behind spans, from the last span to the first, and add what each passes to `of_delta`."""
    of_after = queries.new_zeros(*queries.shape[:-1], dy.shape[-1])
    for number in reversed(range(max(spans.counts.tolist(), default=0))):
        active = spans.firsts[spans.counts > number] + number
        of_delta[active] += passed[active] @ of_after[active]
        if number:
            summed = queries[active] @ dy[active] - keys[active] @ of_delta[active]
            of_after[active - 1] = last[active] * of_after[active] + summed
    return of_after
