"""The recurrence of the gated delta rule on a CPU, token after token, for many sequences side by side, and its gradient.

    S <- decay S        e = v - S^T k        S <- S + k (beta e)^T        o = S^T q             S float32 [k_dim, v_dim] for each head

A step is elementwise products and sums over k_dim, in float32 and in one thread. Its bits for a head depend on k_dim and v_dim only: not on
the other heads and sequences of the step, and not on the tokens that came in the same call. Step i of all sequences runs at once. Sequences
and heads are grouped into parts whose states fit in a core's cache.

The forward pass keeps e and the state before every `SPAN`-th token for the backward pass (`kernels.gated_delta.spans`).
"""

import functools
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from megatron_rl.kernels.gated_delta.spans import differentiate, find_spans
from megatron_rl.precision.threads import single_threaded
from parallel.attention.gated_delta_net import SPAN

_PART = 1 << 17  # numbers of the states that a step updates, 512 KiB


class Part(NamedTuple):
    """Sequences of a packed row that run side by side, the longest first."""

    sequences: torch.Tensor  # int64 [n]
    rows: torch.Tensor  # int64: the tokens of these sequences in the packed row, step after step
    counts: tuple[int, ...]  # sequences of each step; they only become fewer


class Inputs(NamedTuple):
    """Inputs of the recurrence, float32: queries (normalized and scaled), keys (normalized), values, decay, and beta."""

    q: torch.Tensor  # [t, heads, k_dim]
    k: torch.Tensor  # [t, heads, k_dim]
    v: torch.Tensor  # [t, heads, v_dim]
    decay: torch.Tensor  # [t, heads], in (0, 1]
    beta: torch.Tensor  # [t, heads], in [0, 1]

    def choose(self, rows: torch.Tensor, heads: slice) -> "Inputs":
        """Return rows and heads of the inputs, with the dimensions of states `[t, heads, k_dim, v_dim]`."""
        q, k, v, decay, beta = (x[:, heads][rows] for x in self)
        return Inputs(q.unsqueeze(-1), k.unsqueeze(-1), v.unsqueeze(-2), decay[..., None, None], beta[..., None, None])

    def steps(self, counts: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Iterate over the steps of chosen inputs."""
        return zip(*(x.split(counts) for x in self), strict=True)


@functools.lru_cache(16)
def lay_out(lengths: tuple[int, ...], at_once: int) -> tuple[Part, ...]:
    """Divide the packed sequences of `lengths` tokens into parts of at most `at_once` sequences of similar length."""
    starts = list(accumulate(lengths, initial=0))
    order = sorted((n for n, length in enumerate(lengths) if length), key=lambda n: -lengths[n])
    parts = []
    for first in range(0, len(order), at_once):
        chosen = order[first : first + at_once]
        steps = torch.arange(lengths[chosen[0]])[:, None]
        inside = steps < torch.tensor([lengths[n] for n in chosen])
        rows = (torch.tensor([starts[n] for n in chosen]) + steps)[inside]
        parts.append(Part(torch.tensor(chosen), rows, tuple(inside.sum(1).tolist())))
    return tuple(parts)


def _divide(lengths: tuple[int, ...], heads: int, numbers: int) -> Iterator[tuple[Part, slice]]:
    """Yield parts and ranges of heads whose states have about `_PART` numbers; the state of a head has `numbers`."""
    share = min(heads, max(1, _PART // numbers))
    for part in lay_out(lengths, max(1, _PART // (numbers * share))):
        for first in range(0, heads, share):
            yield part, slice(first, first + share)


def advance_states(inputs: Inputs, states: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return the outputs `[t, heads, v_dim]` of packed sequences, and update their states `[n, heads, k_dim, v_dim]`."""
    out = torch.empty_like(inputs.v)
    with single_threaded():
        for part, heads in _divide(lengths, inputs.v.shape[1], states[0, 0].numel()):
            chosen, state = inputs.choose(part.rows, heads), states[part.sequences, heads]
            results = torch.empty_like(chosen.v)
            _run(chosen, part.counts, state, results, None)
            out[part.rows, heads], states[part.sequences, heads] = results.squeeze(-2), state
    return out


def _run(
    inputs: Inputs, counts: tuple[int, ...], state: torch.Tensor, out: torch.Tensor, error: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Write the outputs of chosen inputs, and e unless None, and update `state`. Return the state before each span if e is asked for."""
    kept, product, active, delta = [], torch.empty_like(state), 0, torch.empty_like(out[: counts[0]])
    errors = (None,) * len(counts) if error is None else error.split(counts)
    for step, ((q, k, v, decay, beta), o, e) in enumerate(zip(inputs.steps(counts), out.split(counts), errors, strict=True)):
        if counts[step] != active:
            active = counts[step]
            state, product, delta = state[:active], product[:active], delta[:active]
        if e is None:
            e = delta
        elif step % SPAN == 0:
            kept.append(state.clone())
        state.mul_(decay)
        torch.sum(torch.mul(state, k, out=product), -2, keepdim=True, out=e)
        torch.sub(v, e, out=e)
        state.addcmul_(k, torch.mul(e, beta, out=delta))
        torch.sum(torch.mul(state, q, out=product), -2, keepdim=True, out=o)
    return kept


class Scan(torch.autograd.Function):
    """Outputs `[t, heads, v_dim]` of packed sequences that start with a state of zeros."""

    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, ...], *tensors: torch.Tensor) -> torch.Tensor:
        inputs, spans = Inputs(*tensors), find_spans(lengths)
        k_dim, (_, heads_count, v_dim) = inputs.k.shape[-1], inputs.v.shape
        out, errors = torch.empty_like(inputs.v), torch.empty_like(inputs.v)
        states = inputs.v.new_empty(len(spans.tokens), heads_count, k_dim, v_dim)
        with single_threaded():
            for part, heads in _divide(lengths, heads_count, k_dim * v_dim):
                chosen = inputs.choose(part.rows, heads)
                results, error = torch.empty_like(chosen.v), torch.empty_like(chosen.v)
                state = inputs.v.new_zeros(part.counts[0], chosen.v.shape[1], k_dim, v_dim)
                for number, before in enumerate(_run(chosen, part.counts, state, results, error)):
                    states[spans.firsts[part.sequences[: len(before)]] + number, heads] = before
                out[part.rows, heads], errors[part.rows, heads] = results.squeeze(-2), error.squeeze(-2)
        ctx.save_for_backward(inputs.q, inputs.k, inputs.decay, inputs.beta, errors, states)
        ctx.lengths = lengths
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *inputs, errors, states = ctx.saved_tensors
        with single_threaded():
            return None, *differentiate(inputs, ctx.lengths, errors, states, gradient)
