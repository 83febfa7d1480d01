"""Packed micro-batches, which a forward pass takes: sequences laid end to end in one row.

Shape legend: `_T` tokens, `_A` answer tokens, [1, t] a micro-batch. The last token of a sequence predicts nothing and has no place there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from megatron_rl.batch.packing import pack
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.precision.ops.batch_invariant import MIN_ROWS

_EMPTY = torch.empty(0)


@dataclass
class MicroBatch:
    """Tensors [1, t]; a place holds a token and what belongs to the next one, its target. Whoever attends must know `lengths`.

    `mask` is 1.0 where the target is a sampled answer token.
    """

    sample_indices: list[int]
    """Index of each packed sequence in the list of sequences, in order."""
    lengths: list[int]
    """Places of each packed sequence, padding at its end included; where padding follows, its places come last, as one sequence more."""
    padding: int
    """Places without a token of a sequence."""
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    loss_weights: torch.Tensor
    """The sequence's weight where `mask` is 1, else 0."""
    importance_weights: torch.Tensor
    """The token's correction where `mask` is 1, else 0."""
    token_indices: torch.Tensor
    """int64: which of the places of all sequences together this is; -1 for padding."""
    routed_experts: torch.Tensor
    """The record of the routing, [1, t, layers, k]; empty for none."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same with every tensor on `device`."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)

    def iter_target_positions(self, sequences: list[TrainingSample]) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of the sequence, int64 [A]: where its sampled tokens are targets)."""
        for index, start in zip(self.sample_indices, accumulate(self.lengths, initial=0), strict=False):
            yield index, start + sequences[index].target_positions

    def split_by_sample(self, values: torch.Tensor, sequences: list[TrainingSample]) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of the sequence, its sampled tokens' part [A]) of a tensor [1, t] aligned with `targets`."""
        for index, places in self.iter_target_positions(sequences):
            yield index, values[0, places]

    def average_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """At every place the mean over the targets of its own sequence; `values` [1, t], returns [1, t], with gradient."""
        owner = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths)).to(values.device)
        zeros = values.new_zeros(len(self.lengths))
        sums, counts = (zeros.index_add(0, owner, x[0].to(values.dtype)) for x in (values * self.mask, self.mask))
        return (sums / counts.clamp(min=1))[owner].unsqueeze(0)


def make_micro_batches(
    sequences: list[TrainingSample],
    max_tokens: int,
    replica: int = 0,
    replicas: int = 1,
    multiple: int = 1,
    context: int = 1,
    rounds: int = 1,
) -> list[MicroBatch]:
    """One data-parallel replica's micro-batches of at most `max_tokens` places, a sequence that is longer alone in one.

    Padding only brings a micro-batch to a multiple of `multiple` places and to `MIN_ROWS`. Every replica gets the same number of
    micro-batches, since expert-parallel ranks must take every step together; one that is left without a sequence gets padding alone.

    `context` ranks share the places of every sequence, which is padded to a multiple of 2 * `context` of them (`mcore.context`), and
    compute at most `max_tokens` each. The number of micro-batches is a multiple of `rounds`.
    """
    if any(not sequence.prompt_ids for sequence in sequences):
        raise ValueError("a sequence has no prompt token, so nothing predicts its first answer token")
    part = 2 * context if context > 1 else 1
    lengths = [_round_up(sequence.length - 1, part) for sequence in sequences]
    bins = pack(lengths, max_tokens * context, replicas * rounds)
    fewest = _round_up(MIN_ROWS * context, part * multiple)
    return [_pack_row(bin, sequences, [lengths[index] for index in bin], part * multiple, fewest) for bin in bins[replica::replicas]]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _pack_row(sample_indices: list[int], sequences: list[TrainingSample], lengths: list[int], multiple: int, fewest: int) -> MicroBatch:
    rest = max(_round_up(sum(lengths), multiple), fewest) - sum(lengths)
    lengths = lengths + [rest] * bool(rest)
    shape = (1, sum(lengths))
    tokens, targets = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask, advantages, old, reference, loss_weights, importance_weights = (torch.zeros(shape) for _ in range(6))
    token_indices, experts = torch.full(shape, -1), _no_experts(shape, sequences)
    firsts = list(accumulate((sequence.length - 1 for sequence in sequences), initial=0))
    start = 0
    for index, length in zip(sample_indices, lengths, strict=False):
        sequence = sequences[index]
        ids = torch.tensor(sequence.prompt_ids + sequence.response_ids)
        end = start + sequence.length - 1
        tokens[0, start:end] = ids[:-1]
        targets[0, start:end] = ids[1:]
        answer = (0, start + sequence.target_positions)
        mask[answer] = 1.0
        advantages[answer] = sequence.advantage
        loss_weights[answer] = sequence.loss_weight
        importance_weights[answer] = sequence.importance_weights if len(sequence.importance_weights) else 1.0
        token_indices[0, start:end] = torch.arange(firsts[index], firsts[index + 1])
        if len(sequence.routed_experts):
            experts[0, start:end] = sequence.routed_experts
        if len(sequence.old_logprobs):
            old[answer] = sequence.old_logprobs
        if len(sequence.reference_logprobs):
            reference[answer] = sequence.reference_logprobs
        start += length
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    padding = sum(lengths) - sum(sequences[index].length - 1 for index in sample_indices)
    return MicroBatch(
        sample_indices,
        lengths,
        padding,
        tokens,
        targets,
        positions,
        mask,
        advantages,
        old,
        reference,
        loss_weights,
        importance_weights,
        token_indices,
        experts,
    )


def _no_experts(shape: tuple[int, int], sequences: list[TrainingSample]) -> torch.Tensor:
    """What a record holds of padding: the first experts, since it must go to k different ones, as every token does. Empty for none."""
    one = sequences[0].routed_experts
    return torch.arange(one.shape[2], dtype=one.dtype).repeat(*shape, one.shape[1], 1) if len(one) else _EMPTY
