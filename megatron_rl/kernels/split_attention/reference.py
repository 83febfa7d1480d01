"""Causal attention with an optional window and sinks over keys that lie anywhere in memory, and its gradient for packed sequences.

On a GPU, a row has the bits of its own keys, whether its sequence is packed with others, cut into chunks, or decoded token by token: keys
are summed in splits and blocks at absolute positions, and every product has the same matrix instruction. On a CPU,
`batch_invariant.attention` is the operator of models; this reference computes by the formula, for tests.
"""

from typing import Any

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.attention.gradients import differentiate, differentiate_sinks, hide_keys
from megatron_rl.kernels.split_attention import Sequences, pack


@with_kernel
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences,
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result `[t, h, d]` and float32 `[h, t]`, the logarithm of each row's sum of exponentials.

    Args:
        query: `[t, h, d]`, the last tokens of each sequence.
        key, value: `[slots, g, d]`, with grouped-query heads if g < h.
        sinks: `[h]`, scores of a key without a value, which the log-sums include.
        window: number of keys that a token attends to, itself included; 0: all before it.
    """
    out, log_sums = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    starts, per_group = sequences.starts.tolist(), query.shape[1] // key.shape[1]
    for number, (count, row) in enumerate(zip(sequences.key_counts.tolist(), sequences.rows.tolist(), strict=True)):
        own = slice(starts[number], starts[number + 1])
        slots = sequences.slots.flatten()[row * sequences.row_stride :][:count].long()
        keys, values = (x[slots].repeat_interleave(per_group, 1) for x in (key, value))
        hidden = hide_keys(own.stop - own.start, count, window).to(query.device)
        scores = (torch.einsum("shd,thd->hst", query[own], keys) * scale).masked_fill(hidden, -torch.inf)
        beside = scores.new_empty(*scores.shape[:2], 0) if sinks is None else sinks.to(scores)[:, None, None].expand(-1, len(hidden), 1)
        sums = torch.cat([scores, beside], -1).logsumexp(-1)
        out[own], log_sums[:, own] = torch.einsum("hst,thd->shd", (scores - sums[..., None]).exp(), values), sums
    return out, log_sums


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Return the attention of packed sequences, with gradient; arguments as in `attention.reference.flash_attention`."""
    return _PackedAttention.apply(query, key, value, sinks, starts, longest, query.shape[-1] ** -0.5 if scale is None else scale, window)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, *options: Any
    ) -> torch.Tensor:
        ctx.starts, ctx.longest, ctx.scale, ctx.window = starts, longest, scale, window = options
        output, log_sums = attend(query, key, value, pack(starts, longest, len(query)), scale, sinks, window)
        ctx.save_for_backward(query, key, value, output, log_sums, sinks)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        found = differentiate(gradient, saved, ctx.starts, ctx.longest, ctx.scale, ctx.window)
        of_sinks = None if sinks is None else differentiate_sinks(gradient, saved[3], saved[4], sinks)
        return *found, of_sinks, None, None, None, None
