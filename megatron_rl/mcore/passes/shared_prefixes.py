"""Samples of a row that begin alike compute what they share once: the prompt of a group, and what its completions have in common. On a CPU,
the bits of a token depend on the tokens before it only (`kernels.batch_invariant`), so those of a prefix are the same in every sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.kernels.attention.reference import LengthGroup
from parallel.attention import GatedDeltaNet


@dataclass(frozen=True)
class SharedPrefixes:
    """The positions of a row `[1, t]` that are computed."""

    computed: torch.Tensor  # int64 [u], ascending
    places: torch.Tensor  # int64 [t]: index in `computed` of the position with the same bits

    @classmethod
    def find(cls, batch: MicroBatch) -> SharedPrefixes | None:
        """Find the positions whose sample begins like an earlier one, up to and including them. Return None if there are none."""
        tokens, first = batch.tokens[0].tolist(), dict[tuple[int, int], int]()  # (position of the token before or -1, token) to position
        equal = list(range(len(tokens)))
        starts = list(accumulate(batch.lengths, initial=0))
        for start, length in zip(starts, batch.lengths[: len(batch.sample_indices)], strict=False):
            last = -1
            for position in range(start, start + length):
                equal[position] = last = first.setdefault((last, tokens[position]), position)
        computed, places = torch.tensor(equal).unique(return_inverse=True)
        return cls(computed, places) if len(computed) < len(tokens) else None

    def place(self, groups: list[LengthGroup]) -> list[LengthGroup]:
        """Return the groups of a row's sequences over its computed positions, without sequences that others contain."""
        placed = []
        for group in groups:
            own = group.valid & (self.computed[self.places[group.positions]] == group.positions)
            kept = own.any(1)
            placed.append(LengthGroup(self.places[group.positions[kept]], group.valid[kept], own[kept]))
        return [group for group in placed if len(group.positions)]


def can_share(config: Any, device: torch.device) -> bool:
    """Return whether a model of Megatron's `config` may leave out positions: every operator but attention works per token, on a CPU, ranks
    agree on the positions of a row, and no MTP layer reads the token after a position, too."""
    alone = config.context_parallel_size == config.pipeline_model_parallel_size == 1 and not config.sequence_parallel
    per_token = config.num_moe_experts is None and not any(isinstance(kind, GatedDeltaNet) for kind in config.attention)
    return device.type == "cpu" and alone and per_token and not config.trained_mtp_layers
