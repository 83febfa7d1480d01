"""Turns completions into training samples."""

from __future__ import annotations

import numpy as np
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.rollout.worker import RolloutBatch


def to_training_samples(rollout: RolloutBatch, routing: RoutingShape | None = None) -> list[TrainingSample]:
    """Convert completions, with their rewards, the engine's log-probs and, if `routing` is given, its routing. No column is copied, but of
    answers of several turns.

    Raises RunError if that routing does not fit the model.
    """
    if routing is not None:
        for number, completion in enumerate(rollout.completions_B, 1):
            tokens = len(completion.prompt_ids_T) + len(completion.output_ids_T)
            routing.check(completion.routed_experts_T, tokens, f"completion {number} of {len(rollout.completions_B)}")
    return [
        TrainingSample(
            torch.from_numpy(completion.prompt_ids_T),
            torch.from_numpy(completion.output_ids_T),
            reward=completion.score,
            excluded=completion.reward.excluded,
            rollout_logprobs=_sampled(completion.logprobs_T, completion.response_mask_T),
            response_mask=_to_tensor(completion.response_mask_T),
            routed_experts=_to_tensor(None if routing is None else completion.routed_experts_T),
            kept_tokens=completion.kept_tokens,
            version_lags=_sampled(completion.version_lags_T, completion.response_mask_T),
        )
        for completion in rollout.completions_B
    ]


def _sampled(values_T: np.ndarray | None, response_mask_T: np.ndarray | None) -> torch.Tensor:
    """Return the values of the policy's own tokens, without the environment's; no mask for an answer of one turn."""
    return _to_tensor(values_T if values_T is None or response_mask_T is None else values_T[response_mask_T])


def _to_tensor(values: np.ndarray | None) -> torch.Tensor:
    return torch.empty(0) if values is None else torch.from_numpy(values)
