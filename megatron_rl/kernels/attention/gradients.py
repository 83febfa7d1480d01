"""Gradients of causal attention of packed sequences, from its result and its log-sums, whatever kernel computed them.

The weights are exp(scores - log-sums), so the sinks' share, which has no value, is in the log-sums alone.
"""

import itertools
from collections.abc import Sequence

import torch


def differentiate(
    gradient: torch.Tensor, saved: Sequence[torch.Tensor], starts: torch.Tensor, longest: int, scale: float, window: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value: on a GPU by FlashAttention 2 of torch, otherwise by the formula.

    Args:
        gradient: `[t, h, d]`, of the result.
        saved: query `[t, h, d]`, key and value `[t, g, d]`, the result `[t, h, d]`, and its log-sums, float32 `[h, t]`.
        starts: int32 `[n + 1]`: starts of the sequences, and the end of the last.
        window: number of keys that a token attends to, itself included; 0: all before it.
    """
    if gradient.is_cuda:
        return differentiate_by_flash_attention(gradient, saved, starts, longest, scale, window)
    return _differentiate_by_formula(gradient, saved, starts, scale, window)


def differentiate_by_flash_attention(
    gradient: torch.Tensor, saved: Sequence[torch.Tensor], starts: torch.Tensor, longest: int, scale: float, window: int = 0
) -> tuple[torch.Tensor, ...]:
    """Compute `differentiate` by the backward pass of torch's `varlen_attn`."""
    unused = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # the random numbers of a dropout
    within = [window - 1, 0]  # -1: no window
    found: tuple[torch.Tensor, ...] = torch.ops.torch_attn._varlen_attn_backward(
        gradient.contiguous(), *saved, starts, starts, longest, longest, True, unused, scale, within
    )
    return found


def differentiate_sinks(gradient: torch.Tensor, output: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `sinks` `[h]`, which `log_sums` include."""
    weights = (sinks.float()[:, None] - log_sums).exp()  # [h, t]
    return -(weights * (gradient.float() * output.float()).sum(-1).t()).sum(1).to(sinks.dtype)


def hide_keys(queries: int, keys: int, window: int) -> torch.Tensor:
    """Return bool `[queries, keys]`: whether a key is hidden from one of the last queries of a sequence."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (distance < 0) | (distance >= (window or keys + 1))


def _differentiate_by_formula(
    gradient: torch.Tensor, saved: Sequence[torch.Tensor], starts: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, ...]:
    results, log_sums = tuple(torch.zeros_like(x) for x in saved[:3]), saved[4]
    for own in itertools.starmap(slice, itertools.pairwise(starts.tolist())):
        dy, q, k, v, y = (x[own].float() for x in (gradient, *saved[:4]))
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("shd,thd->hst", q, keys) * scale - log_sums[:, own, None]
        weights = scores.exp().masked_fill(hide_keys(len(q), len(q), window), 0.0)
        of_weights = torch.einsum("shd,thd->hst", dy, values) - (dy * y).sum(-1).t()[..., None]
        of_scores = weights * of_weights * scale
        of_keys = (torch.einsum("hst,shd->thd", of_scores, q), torch.einsum("hst,shd->thd", weights, dy))
        parts = torch.einsum("hst,thd->shd", of_scores, keys), *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in of_keys)
        for into, part in zip(results, parts, strict=True):
            into[own] = part
    return results
