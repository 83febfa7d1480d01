"""Gated delta nets for tests: small layers, the plain formula, and sequences that advance in cuts."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megatron_rl.kernels.gated_delta import DeltaHeads, DeltaWeights
from support.kernel_tests import random

Row = Sequence[torch.Tensor]  # mixed [t, c], a [t, v], b [t, v]

ADVANCE_CASES = {
    "one token": [[1]],
    "token by token": [[1] * 70],
    "batch of 16": [[5 + n, *[1] * 6] for n in range(16)],
    "chunks of 40": [[40, 40, 40, 13], [40, 29], [7]],
    "chunks, others empty": [[0, 3, 0, 64, 1], [70, 0, 1], [0, 0, 0, 333]],
    "long": [[200, 133], [1, 332]],
}
"""For each sequence, the tokens of its chunks. The first chunks of all sequences come in one call, then the second ones, and so on."""


def draw_layer(heads: DeltaHeads, tokens: int, dtype: torch.dtype, taps: int = 4) -> tuple[DeltaWeights, list[torch.Tensor]]:
    """Return random weights and a row of `tokens` tokens."""
    channels = sum(heads.widths)
    weights = DeltaWeights(random(channels, taps, seed=0, dtype=dtype), random(heads.v, seed=1), random(heads.v, seed=2), heads)
    return weights, [random(tokens, width, seed=3 + n, dtype=dtype) for n, width in enumerate((channels, heads.v, heads.v))]


def choose_heads(weights: DeltaWeights, row: Row, rank: int, ranks: int) -> tuple[DeltaWeights, *tuple[torch.Tensor, ...]]:
    """Return the weights and the row of one of `ranks` tensor-parallel ranks."""
    heads, (mixed, a, b) = weights.heads, row
    places = torch.cat([part.chunk(ranks)[rank] for part in torch.arange(sum(heads.widths)).split(heads.widths)])
    own = heads._replace(k=heads.k // ranks, v=heads.v // ranks)
    conv, *others = weights.conv[places], *(x.chunk(ranks)[rank] for x in weights[1:3])
    return DeltaWeights(conv, *others, own), mixed[:, places], *(x.chunk(ranks, 1)[rank] for x in (a, b))


def advance_in_cuts(advance: Callable, weights: DeltaWeights, row: Row, cuts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
    """Return (outputs, windows, states) of packed sequences that are computed chunk by chunk. A call has the next chunks of all sequences
    that have one, in another order each time, in slots in which anything was before."""
    heads, lengths = weights.heads, [sum(chunks) for chunks in cuts]
    out = row[0].new_full((sum(lengths), heads.v, heads.v_dim), torch.nan)
    slots = torch.randperm(len(cuts) + 2, generator=torch.Generator().manual_seed(0))[: len(cuts)].int()
    windows = row[0].new_full((len(cuts) + 2, row[0].shape[1], weights.conv.shape[1] - 1), torch.nan)
    states = torch.full((len(cuts) + 2, heads.v, heads.k_dim, heads.v_dim), torch.nan)
    places = [list(range(start, start + length)) for start, length in zip(_starts(lengths), lengths, strict=True)]
    for call in range(max(map(len, cuts))):
        chosen = [n for n, chunks in enumerate(cuts) if call < len(chunks)]
        chosen = chosen[call % len(chosen) :] + chosen[: call % len(chosen)]
        rows = torch.tensor([places[n].pop(0) for n in chosen for _ in range(cuts[n][call])], dtype=torch.int64)
        own = ~slots[chosen] if call == 0 else slots[chosen]
        out[rows] = advance(weights, *(x[rows] for x in row), [cuts[n][call] for n in chosen], own, windows, states)
    others = [n for n in range(len(windows)) if n not in slots]
    assert windows[others].isnan().all() and states[others].isnan().all(), "slots of others stay"
    return out, windows[slots], states[slots]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths))]


def attend_plainly(weights: DeltaWeights, mixed: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Compute `attend` by the formula of the paper (Gated Delta Networks, arXiv:2412.06464), for autograd, in the dtype of the inputs."""
    heads, outs = weights.heads, []
    a_log, dt_bias = (x.to(mixed.dtype) for x in weights[1:3])
    for part, a_part, b_part in zip(*(x.split(list(lengths)) for x in (mixed, a, b)), strict=True):
        padded = F.pad(part.t(), (weights.conv.shape[1] - 1, 0))
        x = F.silu(F.conv1d(padded[None], weights.conv[:, None], groups=len(padded))[0].t())
        q, k, v = (
            y.unflatten(-1, (-1, dim)) for y, dim in zip(x.split(heads.widths, -1), (heads.k_dim, heads.k_dim, heads.v_dim), strict=True)
        )
        q, k = ((y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads.v // heads.k, 1) for y in (q, k))
        log_decay, beta = -a_log.exp() * F.softplus(a_part + dt_bias), b_part.sigmoid()
        q = q * heads.k_dim**-0.5
        outs.append(recur_plainly((q, k, v, log_decay.exp(), beta), [len(part)]))
    return torch.cat(outs)


def recur_plainly(inputs: Sequence[torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Compute the recurrence of `scan.Inputs` for packed sequences by its formula, for autograd."""
    outs = []
    for q, k, v, decay, beta in zip(*(x.split(list(lengths)) for x in inputs), strict=True):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for t in range(len(v)):
            state = state * decay[t, :, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * error)
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outs)


RECURRENCES = {
    "usual": (0.7, 1.0, 1.0),
    "kept": (1.0, 1.0, 1.0),  # nothing decays
    "kept, like keys": (0.999, 1.0, 0.05),
    "gone": (0.0, 1e-6, 1.0),
    "gone, then kept": (0.0, 1.0, 1.0),  # a fifth of the tokens has a decay of 1e-30 or 0
}
"""(least decay, greatest decay, how much the keys differ) of recurrences that are hard to differentiate in spans."""


def draw_recurrence(name: str, tokens: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> list[torch.Tensor]:
    """Return float32 `scan.Inputs` with `v_heads` heads, in groups with one query and one key."""
    low, high, spread = RECURRENCES[name]
    q, k = (F.normalize(random(tokens, k_heads, k_dim, seed=seed), dim=-1) for seed in (0, 1))
    k = F.normalize(spread * k + (1 - spread) * k[:1], dim=-1)
    share = random(tokens, v_heads, seed=2).sigmoid()
    decay = low + (high - low) * share
    if name == "gone, then kept":
        decay = torch.where(share > 0.7, 1.0, torch.where(share < 0.3, torch.where(share < 0.25, 0.0, 1e-30), 0.99))
    q, k = (x.repeat_interleave(v_heads // k_heads, 1) for x in (q * k_dim**-0.5, k))
    return [q, k, random(tokens, v_heads, v_dim, seed=3), decay, random(tokens, v_heads, seed=4).sigmoid()]
