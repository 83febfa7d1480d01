"""Packed micro-batches for the forward pass: samples are concatenated in one row. Shape legend: `_A` sampled response tokens, [1, t] a row.
Position i of a sample holds token i and its target, token i + 1. The last token of a sample has no target and takes no position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from megatron_rl.batch.kept_tokens import pad_kept_tokens
from megatron_rl.batch.packing import compute_costs, pack, round_up
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.batch_invariant import MIN_ROWS
from megatron_rl.kernels.device_copy import copy_to_device

_EMPTY, _NOT_DRAWN = torch.empty(0), torch.tensor([-1.0, math.nan], dtype=torch.float64)
_OPTIONAL_FIELDS = ("values", "returns", "teacher_logprobs")
_COLUMNS = ("old_logprobs", "reference_logprobs", "high_covariance", "importance_weights", "draws")
_FLOAT_FIELDS = ("mask", "advantages", "old_logprobs", "reference_logprobs", "loss_weights", "importance_weights", "high_covariance")


@dataclass
class MicroBatch:
    """One packed row of samples: tensors [1, t], one position per token. Attention must respect `lengths`."""

    sample_indices: list[int]  # indices of the packed samples in the list of samples, in order
    lengths: list[int]  # positions of each packed sample, including its padding. Padding at the end of the row counts as one more sample.
    padding: int  # number of positions without a token
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor  # position within the sample, for rotary embeddings
    mask: torch.Tensor  # 1.0 if the target is a sampled response token, else 0
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    loss_weights: torch.Tensor  # the sample's loss weight if `mask` is 1, else 0
    importance_weights: torch.Tensor  # the token's importance weight if `mask` is 1, else 0
    high_covariance: torch.Tensor  # 1.0 for tokens chosen by `algorithm.covariance`, else 0
    token_indices: torch.Tensor  # int64 index of the position among the positions of all of the replica's samples; -1 for padding
    routed_experts: torch.Tensor  # recorded experts [1, t, layers, k], or empty
    kept_tokens: torch.Tensor
    """Tokens over which log-probs are normalized, int32 [1, t, n], padded with -1; all -1 means all tokens. May be empty."""
    values: torch.Tensor  # the critic's values before the step's updates, 0 if `mask` is 0. Empty without a critic, like `returns`.
    returns: torch.Tensor
    teacher_logprobs: torch.Tensor  # empty without a teacher
    draws: torch.Tensor  # float64 [1, t, 2] like `TrainingSample.draws`, or empty

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: copy_to_device(value, device) for name, value in tensors.items()}
        return replace(self, **moved)

    def shift(self, row: torch.Tensor, by: int) -> torch.Tensor:
        """Return, at every position, the value of `row` `by` positions later in the same sample, or 0 past its end: [1, t], on the CPU."""
        owner = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        kept = row[:, by:] * (owner[by:] == owner[: len(owner) - by])
        return torch.nn.functional.pad(kept, (0, by))

    def find_targets(self, samples: list[TrainingSample]) -> torch.Tensor:
        """Return the positions in the row that predict sampled tokens, sample after sample, int64, on the CPU."""
        starts = accumulate(self.lengths, initial=0)
        places = [start + samples[index].target_positions for index, start in zip(self.sample_indices, starts, strict=False)]
        return torch.cat(places) if places else torch.empty(0, dtype=torch.long)

    def split_by_sample(self, values: torch.Tensor, samples: list[TrainingSample]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the sample, values [A] of its sampled tokens). `values` [1, t] is aligned with `targets`."""
        for index, start in zip(self.sample_indices, accumulate(self.lengths, initial=0), strict=False):
            yield index, values[0, start + samples[index].target_positions]

    def sum_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Return, at every position, the sum of `values` over the targets of its sample. [1, t] to [1, t], differentiable."""
        owner, (sums,) = self._sum_samples(values)
        return sums[owner].unsqueeze(0)

    def average_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Return, at every position, the mean of `values` over the targets of its sample. [1, t] to [1, t], differentiable."""
        owner, (sums, counts) = self._sum_samples(values, torch.ones_like(values))
        return (sums / counts.clamp(min=1))[owner].unsqueeze(0)

    def _sum_samples(self, *values: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the number of each position's sample, int64 [t], and for each of `values` the samples' sums over their targets."""
        owner = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        owner = copy_to_device(owner, self.mask.device)
        zeros = values[0].new_zeros(len(self.lengths))
        return owner, [zeros.index_add(0, owner, (part * self.mask)[0].to(part.dtype)) for part in values]


class MicroBatches:
    """The micro-batches of a list of samples, packed on access, so that only those in use take memory."""

    def __init__(
        self,
        samples: list[TrainingSample],
        rows: list[list[int]],
        lengths: list[int],
        multiple: int,
        min_length: int,
        padding_experts: torch.Tensor,
    ) -> None:
        """`rows`: indices of each row's samples. `lengths`: positions of each sample with padding. See `make_micro_batches`."""
        self._samples, self._rows, self._lengths, self._padding_experts = samples, rows, lengths, padding_experts
        self._has = {name: any(len(getattr(sample, name)) for sample in samples) for name in _OPTIONAL_FIELDS}
        filled = [sum(lengths[index] for index in row) for row in rows]
        self.widths = [max(round_up(width, multiple), min_length) for width in filled]  # positions of each micro-batch
        self._tails = [width - used for width, used in zip(self.widths, filled, strict=True)]
        self._first_indices = list(accumulate((sample.length - 1 for sample in samples), initial=0))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self[number] for number in range(len(self)))

    @property
    def has_records(self) -> bool:
        """Whether every position has recorded experts."""
        return bool(len(self._padding_experts))

    def list_lengths(self, number: int) -> list[int]:
        """Return `MicroBatch.lengths` of a micro-batch."""
        tail = self._tails[number]
        return [self._lengths[index] for index in self._rows[number]] + [tail] * bool(tail)

    def pack_records(self, number: int, layers: slice = slice(None)) -> torch.Tensor:
        """Return `MicroBatch.routed_experts` of a micro-batch, for some layers."""
        if not self.has_records:
            return _EMPTY
        lengths, padding = self.list_lengths(number), self._padding_experts[layers]
        packed = padding.repeat(1, sum(lengths), 1, 1)
        for index, start in zip(self._rows[number], accumulate(lengths, initial=0), strict=False):
            record = self._samples[index].routed_experts
            packed[0, start : start + len(record)] = record[:, layers]
        return packed

    def __getitem__(self, number: int) -> MicroBatch:
        samples, indices, lengths = self._samples, self._rows[number], self.list_lengths(number)
        shape = (1, sum(lengths))
        kept = [sample.kept_tokens for index in indices if (sample := samples[index]).kept_tokens is not None]
        most_kept = max((int(tokens.counts.max(initial=0)) for tokens in kept), default=0)
        has_draws = any(len(samples[index].draws) for index in indices)
        row = MicroBatch(
            sample_indices=indices,
            lengths=lengths,
            padding=sum(lengths) - sum(samples[index].length - 1 for index in indices),
            tokens=torch.zeros(shape, dtype=torch.long),
            targets=torch.zeros(shape, dtype=torch.long),
            positions=_count_positions(lengths),
            token_indices=torch.full(shape, -1),
            routed_experts=self.pack_records(number),
            kept_tokens=torch.full((*shape, most_kept), -1, dtype=torch.int32) if most_kept else _EMPTY,
            draws=_NOT_DRAWN.repeat(*shape, 1) if has_draws else _EMPTY,
            **{name: torch.zeros(shape) if has else _EMPTY for name, has in self._has.items()},
            **{name: torch.zeros(shape) for name in _FLOAT_FIELDS},
        )
        if indices:
            self._fill(row, [samples[index] for index in indices])
        return row

    def _fill(self, row: MicroBatch, samples: list[TrainingSample]) -> None:
        """Write the values of a row's samples, all samples at once."""
        places = torch.tensor([sample.length - 1 for sample in samples])
        owner, number = torch.repeat_interleave(places), torch.arange(int(places.sum()))  # each position's sample, and positions in order
        starts = torch.tensor([*accumulate(row.lengths, initial=0)][: len(samples)])
        first, before = torch.tensor([self._first_indices[index] for index in row.sample_indices]), places.cumsum(0) - places
        ids = torch.cat([part for sample in samples for part in (sample.prompt_ids, sample.response_ids)]).long()
        in_row = number + (starts - before)[owner]
        row.tokens[0, in_row], row.targets[0, in_row] = ids[number + owner], ids[number + owner + 1]
        row.token_indices[0, in_row] = number + (first - before)[owner]
        targets, counts = row.find_targets(self._samples), torch.tensor([sample.sampled_count for sample in samples])
        row.mask[0, targets] = row.importance_weights[0, targets] = 1.0
        for name in ("loss_weight", "advantage"):
            values = torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.float32)
            getattr(row, f"{name}s")[0, targets] = values.repeat_interleave(counts)
        columns = {name: [getattr(sample, name) for sample in samples] for name in (*_COLUMNS, *_OPTIONAL_FIELDS)}
        columns["advantages"] = [sample.token_advantages for sample in samples]
        if most_kept := row.kept_tokens.shape[-1]:
            kept = [sample.kept_tokens for sample in samples]
            columns["kept_tokens"] = [_EMPTY if tokens is None else pad_kept_tokens(tokens, most_kept) for tokens in kept]
        for name, parts in columns.items():
            known = torch.tensor([part.numel() > 0 for part in parts])
            if known.any():
                into = getattr(row, name)
                into[0, targets[known.repeat_interleave(counts)]] = torch.cat([part for part in parts if part.numel()]).to(into.dtype)


def _count_positions(lengths: list[int]) -> torch.Tensor:
    """Return `MicroBatch.positions` [1, t] of sequences of the given lengths."""
    sizes = torch.tensor(lengths)
    return (torch.arange(sum(lengths)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)).unsqueeze(0)


def make_micro_batches(
    samples: list[TrainingSample],
    max_tokens: int,
    multiple: int = 1,
    cp_size: int = 1,
    vpp_group: int = 1,
    agree: Callable[[int], int] = int,
    attention_length: float = math.inf,
    padding_experts: torch.Tensor = _EMPTY,
) -> MicroBatches:
    """Return micro-batches of at most `max_tokens` positions and about equal cost (`packing`). A longer sample gets its own micro-batch.

    Args:
        multiple: a micro-batch is padded to a multiple of this many positions, and to at least `MIN_ROWS`.
        cp_size: context-parallel ranks that share the positions of every sample, which is padded to a multiple of 2 * `cp_size`
            (`mcore.passes.context_parallel`). Each rank computes at most `max_tokens` positions.
        vpp_group: the number of micro-batches is a multiple of this.
        agree: maps this replica's number of micro-batches to the largest number of all data-parallel replicas. Every replica makes as many,
            because expert-parallel ranks must take every step together. Additional micro-batches hold only padding.
        padding_experts: [layers, k] experts of positions without a token, or empty if the samples have no routing records.
    """
    if any(not len(sample.prompt_ids) for sample in samples):
        raise ValueError("a sequence has no prompt token, so nothing predicts its first response token")
    chunks = 2 * cp_size if cp_size > 1 else 1
    lengths = [round_up(sample.length - 1, chunks) for sample in samples]
    costs = compute_costs(lengths, attention_length)
    bins = pack(lengths, max_tokens * cp_size, vpp_group, costs=costs)
    if (count := agree(len(bins))) > len(bins):
        bins = pack(lengths, max_tokens * cp_size, vpp_group, count, costs)
    return MicroBatches(samples, bins, lengths, chunks * multiple, round_up(MIN_ROWS * cp_size, chunks * multiple), padding_experts)
