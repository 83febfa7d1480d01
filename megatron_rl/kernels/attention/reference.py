"""Causal attention of packed sequences: they are concatenated in one row, and each attends to itself only.

All functions take query `[t, h, d]`, key `[t, g, d]` and value `[t, g, e]`, with grouped-query heads if g < h, and return `[t, h, e]`. A
scale of None is 1 / sqrt(d). On a CPU, sequences of similar length are computed in one batch, with the bits that each has alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from megatron_rl.kernels import batch_invariant
from megatron_rl.precision.threads import run_in_parts


@dataclass(frozen=True)
class LengthGroup:
    """Packed sequences of similar length that are computed in one batch; maps the row `[t]` to the batch `[b, s]` and back."""

    positions: torch.Tensor
    """int64 `[b, s]`: each token's position in the row; beyond the end of a sequence, the position of its first token."""
    valid: torch.Tensor  # bool `[b, s]`: False beyond the end of a sequence
    own: torch.Tensor | None = None
    """bool `[b, s]`: positions whose query belongs to this sequence, if sequences share positions; None: all that are valid."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[t, h, d]` to contiguous `[b, h, s, d]`. Each row of a head is copied once; products would copy a transposed tensor."""
        heads, (batch, width) = x.shape[1], self.positions.shape
        rows = (self.positions * heads)[:, None] + torch.arange(heads)[:, None]
        return x.reshape(-1, x.shape[2]).index_select(0, rows.flatten()).view(batch, heads, width, -1)

    def scatter(self, x: torch.Tensor, into: torch.Tensor) -> None:
        """Write `[b, h, s, d]` to the sequences' own positions in `[t, h, d]`."""
        into.index_copy_(0, *self._select(x, self.queries))

    def add(self, x: torch.Tensor, into: torch.Tensor) -> None:
        """Add `[b, h, s, d]` to all positions of the sequences in `[t, h, d]`, in order."""
        index, values = self._select(x, self.valid)
        into.index_add_(0, index, values.to(into.dtype))

    @property
    def queries(self) -> torch.Tensor:
        """bool `[b, s]`: positions whose result this group writes."""
        return self.valid if self.own is None else self.own

    def _select(self, x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions [n] that are chosen by bool `[b, s]`, and their rows `[n, h, d]` of `[b, h, s, d]`."""
        batch, heads, width, _ = x.shape
        rows = torch.arange(batch * heads * width).view(batch, heads, width).transpose(1, 2)[chosen]
        values = x.reshape(-1, x.shape[3]).index_select(0, rows.flatten())
        return self.positions[chosen], values.view(-1, *x.shape[1::2])


def group_by_length(lengths: list[int]) -> list[LengthGroup]:
    """Group the sequences of a packed row by the number of key chunks (`KEYS_PER_PRODUCT`) that they need. A group is as wide as its
    chunks, not as its longest sequence, so the gradients of a sequence do not depend on the other sequences."""
    starts = list(accumulate(lengths, initial=0))
    numbers_by_chunks: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        numbers_by_chunks.setdefault(-(-length // batch_invariant.KEYS_PER_PRODUCT), []).append(number)
    groups = []
    for chunks, numbers in numbers_by_chunks.items():
        if chunks:
            offsets = torch.arange(chunks * batch_invariant.KEYS_PER_PRODUCT)
            valid = offsets < torch.tensor([lengths[n] for n in numbers])[:, None]
            groups.append(LengthGroup(torch.tensor([starts[n] for n in numbers])[:, None] + offsets * valid, valid))
    return groups


class _PackedCausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, *options: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.groups, ctx.scale, ctx.window = groups, scale, window = options
        result = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in groups:

            def attend(own: slice, group: LengthGroup = group) -> None:
                part = LengthGroup(group.positions[own], group.valid[own], group.queries[own])
                last = torch.arange(part.positions.shape[1]).expand(part.positions.shape)
                q, k, v = (part.gather(x) for x in (query, key, value))
                part.scatter(batch_invariant.attention(q, k, v, last, scale, sinks, window), result)

            run_in_parts(attend, len(group.positions), 1)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        shared = any(group.own is not None for group in ctx.groups)  # then keys and values get gradients from several sequences
        into_query = torch.empty_like(saved[0])
        sums = [torch.zeros_like(x, dtype=torch.float32) if shared else torch.empty_like(x) for x in saved[1:]]
        of_sinks = None if sinks is None else torch.zeros_like(sinks)
        for group in ctx.groups:
            inputs = tuple(group.gather(x) for x in saved)
            padded = group.gather(gradient) * group.queries[:, None, :, None]
            found: Sequence[torch.Tensor]
            if of_sinks is None:
                found = batch_invariant.attention_gradients(inputs, padded, ctx.scale)
            else:
                *found, part = batch_invariant.sink_attention_gradients(inputs, sinks, padded, ctx.scale, ctx.window)
                of_sinks += part
            group.scatter(found[0], into_query)
            for x, into in zip(found[1:], sums, strict=True):
                (group.add if shared else group.scatter)(x, into)
        of_key, of_value = (total.to(x.dtype) for total, x in zip(sums, saved[1:], strict=True))
        return into_query, of_key, of_value, of_sinks, None, None, None


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: list[LengthGroup],
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Compute attention on a CPU with the bits of `batch_invariant.attention` for each sequence alone. `groups` come from
    `group_by_length`. `sinks`, `window`: see `batch_invariant.attention`."""
    return _PackedCausalAttention.apply(query, key, value, sinks, groups, query.shape[-1] ** -0.5 if scale is None else scale, window)


def sdpa_per_sequence(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float | None) -> torch.Tensor:
    """Compute attention with torch's fused kernel, one sequence after the other, on any device."""
    sequences = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True)
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True) for q, k, v in sequences]
    return torch.cat(outputs, 1).transpose(0, 1)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """Compute attention with FlashAttention on a GPU, in BF16 or FP16. `starts` int32 `[n + 1]` holds the starts of the sequences and the
    end of the last."""
    width = value.shape[-1]
    value = batch_invariant.append_zeros(value, -1, query.shape[-1] - width)  # FlashAttention requires equal widths of query, key and value
    grouped, causal = query.shape[1] != key.shape[1], (-1, 0)
    output = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scale, window_size=causal, enable_gqa=grouped)
    return cast(torch.Tensor, output)[..., :width]
