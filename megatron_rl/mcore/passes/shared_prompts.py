"""Frozen models compute the prompt of a group once in a row. On a CPU, the bits of a token depend on the tokens before it only
(`kernels.batch_invariant`), so those of a prompt are the same in every sample that begins with it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.kernels.attention.reference import LengthGroup
from parallel.attention import GatedDeltaNet


@dataclass(frozen=True)
class SharedPrompts:
    """The positions of a row `[1, t]` that are computed."""

    computed: torch.Tensor  # int64 [u], ascending
    places: torch.Tensor  # int64 [t]: index in `computed` of the position with the same bits

    @classmethod
    def find(cls, batch: MicroBatch, samples: list[TrainingSample]) -> SharedPrompts:
        """`samples`: those that the indices of the micro-batch belong to."""
        first, equal = dict[bytes, int](), torch.arange(batch.tokens.numel())
        for index, start in zip(batch.sample_indices, accumulate(batch.lengths, initial=0), strict=False):
            prompt = samples[index].prompt_ids
            if samples[index].response_ids.numel():  # else the last token of the prompt has no position
                same = first.setdefault(prompt.numpy().tobytes(), start)
                equal[start : start + prompt.numel()] = torch.arange(same, same + prompt.numel())
        return cls(*equal.unique(return_inverse=True))

    def place(self, groups: list[LengthGroup]) -> list[LengthGroup]:
        """Return the groups of a row's sequences over its computed positions."""
        return [LengthGroup(self.places[group.positions], group.valid) for group in groups]


def can_share(config: Any, device: torch.device) -> bool:
    """Return whether a model of Megatron's `config` may leave out positions: every operator but attention works per token, on a CPU, and
    ranks agree on the positions of a row."""
    alone = config.context_parallel_size == config.pipeline_model_parallel_size == 1 and not config.sequence_parallel
    per_token = config.num_moe_experts is None and not any(isinstance(kind, GatedDeltaNet) for kind in config.attention)
    return device.type == "cpu" and alone and per_token
