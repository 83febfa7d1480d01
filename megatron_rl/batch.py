"""Sequences and the padded micro-batches that a forward pass takes. Shape legend: `_T` tokens, `_A` answer tokens, [b, s] batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_rl.row_invariant import FEWEST_ROWS

_EMPTY = torch.empty(0)


@dataclass
class Sequence:
    """A prompt with its answer, and what is known of each answer token (float32 [A], empty when not known)."""

    prompt_ids: list[int]
    answer_ids: list[int]
    advantage: float = 0.0
    rollout_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the engine that sampled the answer."""
    old_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the trainer's policy that sampled the answer."""
    reference_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the frozen reference."""
    correction: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Weights of the policy term for the engine's difference from the trainer (`algorithm.corrections`); empty for 1."""
    reward: float = 0.0
    """What the answer earned, before any KL term."""
    weight: float = 1.0
    """Of each answer token in the loss; 1 everywhere is the mean over tokens (`algorithm.aggregate`)."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass
class MicroBatch:
    """Right-padded tensors [b, s]; position t predicts token t + 1, so answer tokens are the targets from prompt end - 1 on.

    `mask` is 1.0 where the target is an answer token. Padding comes last, where a causal mask hides it.
    """

    rows: list[int]
    """Index of each row in the list of sequences."""
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    old_logprobs: torch.Tensor
    reference_logprobs: torch.Tensor
    weights: torch.Tensor
    """The sequence's weight where `mask` is 1, else 0."""
    corrections: torch.Tensor
    """The token's correction where `mask` is 1, else 0."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same with every tensor on `device`."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)

    def answers(self, values: torch.Tensor, sequences: list[Sequence]) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of the sequence, its answer's part [A]) of a tensor [b, s] aligned with `targets`."""
        for row, index in enumerate(self.rows):
            start = len(sequences[index].prompt_ids) - 1
            yield index, values[row, start : start + len(sequences[index].answer_ids)]


def micro_batches(sequences: list[Sequence], size: int, replica: int = 0, replicas: int = 1, multiple: int = 1) -> list[MicroBatch]:
    """One data-parallel replica's micro-batches of at most `size` rows, their width a multiple of `multiple`; none has
    fewer than `FEWEST_ROWS` tokens, padding included.

    The longest sequences come first, so that neighbours are of like length, and are dealt out like cards, so that replicas work alike.
    Every replica gets the same number of micro-batches, since expert-parallel ranks must take every step together; one that is left
    without a sequence gets a row of padding.
    """
    if any(not sequence.prompt_ids for sequence in sequences):
        raise ValueError("a sequence has no prompt token, so nothing predicts its first answer token")
    order = sorted(range(len(sequences)), key=lambda index: -sequences[index].length)
    deal = size * replicas
    return [_pad(order[start + replica : start + deal : replicas], sequences, multiple) for start in range(0, len(order), deal)]


def _pad(rows: list[int], sequences: list[Sequence], multiple: int) -> MicroBatch:
    longest = max((sequences[index].length for index in rows), default=2) - 1
    height = max(len(rows), 1)
    width = -(-max(longest, -(-FEWEST_ROWS // height)) // multiple) * multiple
    shape = (height, width)
    tokens, targets = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask, advantages, old, reference, weights, corrections = (torch.zeros(shape) for _ in range(6))
    for row, index in enumerate(rows):
        sequence = sequences[index]
        ids = torch.tensor(sequence.prompt_ids + sequence.answer_ids)
        tokens[row, : len(ids) - 1] = ids[:-1]
        targets[row, : len(ids) - 1] = ids[1:]
        answer = slice(len(sequence.prompt_ids) - 1, len(ids) - 1)
        mask[row, answer] = 1.0
        advantages[row, answer] = sequence.advantage
        weights[row, answer] = sequence.weight
        corrections[row, answer] = sequence.correction if len(sequence.correction) else 1.0
        if len(sequence.old_logprobs):
            old[row, answer] = sequence.old_logprobs
        if len(sequence.reference_logprobs):
            reference[row, answer] = sequence.reference_logprobs
    positions = torch.arange(width).expand(shape).contiguous()
    return MicroBatch(rows, tokens, targets, positions, mask, advantages, old, reference, weights, corrections)
