"""Turns completions into training samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.rollout.worker import RolloutBatch


def to_training_samples(rollout: RolloutBatch, version: int = 0, routing: RoutingShape | None = None) -> list[TrainingSample]:
    """Convert completions for a trainer at `version`, with their rewards, the engine's log-probs and, if `routing` is given, its routing.

    Raises RunError if that routing does not fit the model.
    """
    if routing is not None:
        for number, completion in enumerate(rollout.completions_B, 1):
            tokens = len(completion.prompt_ids_T) + len(completion.output_ids_T)
            routing.check(completion.routed_experts_T, tokens, f"completion {number} of {len(rollout.completions_B)}")
    return [
        TrainingSample(
            completion.prompt_ids_T,
            completion.output_ids_T,
            reward=completion.score,
            excluded=completion.reward.excluded,
            rollout_logprobs=_sampled(completion.logprobs_T, completion.response_mask_T),
            response_mask=completion.response_mask_T,
            routed_experts=torch.empty(0) if routing is None else torch.from_numpy(completion.routed_experts_T),
            kept_tokens=completion.kept_tokens,
            version_lags=_sampled([version - sampled_by for sampled_by in completion.versions_T], completion.response_mask_T),
        )
        for completion in rollout.completions_B
    ]


def _sampled(values_T: Sequence[float], response_mask_T: list[bool]) -> torch.Tensor:
    """Return the values of the policy's own tokens, without the environment's; no mask for an answer of one turn."""
    values = torch.tensor(values_T)
    return values[torch.tensor(response_mask_T)] if response_mask_T and values_T else values
