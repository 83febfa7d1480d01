"""A sampled answer as the trainer learns from it. Shape legend: `_A` sampled answer tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_EMPTY = torch.empty(0)


@dataclass
class TrainingSample:
    """A prompt with its answer, and what is known of each token of it that the policy sampled (float32 [A], empty when not known).

    A counts sampled tokens only: what an environment wrote in between is read by the model, but nothing is ever known or learnt of it.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    advantage: float = 0.0
    rollout_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the engine that sampled the answer."""
    old_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the trainer's policy that sampled the answer."""
    reference_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the frozen reference."""
    importance_weights: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Weights of the policy term for the engine's difference from the trainer (`algorithm.corrections`); empty for 1."""
    reward: float = 0.0
    """What the answer earned, before any KL term."""
    excluded: bool = False
    """Nothing is known of what it earned: it teaches nothing and no mean counts it."""
    loss_weight: float = 1.0
    """Of each sampled token in the loss; 1 everywhere is the mean over tokens (`algorithm.aggregate`)."""
    response_mask: list[bool] = field(default_factory=list)
    """For each answer token, False where an environment wrote it; empty where all were sampled."""
    routed_experts: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """The record of its routing that the forward passes replay (`routing`), uint8 or int16 [length - 1, layers, k]; empty for none. All
    sequences of a batch have one, or none has."""
    version_lags: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Policy versions between the one that sampled and the trainer's, int64 [A]; empty for 0."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def sampled_count(self) -> int:
        """A."""
        return sum(self.response_mask) if self.response_mask else len(self.response_ids)

    @property
    def target_positions(self) -> torch.Tensor:
        """The positions whose targets are the sampled tokens, int64 [A]: position t predicts token t + 1."""
        answer = torch.arange(len(self.prompt_ids) - 1, self.length - 1)
        return answer[torch.tensor(self.response_mask)] if self.response_mask else answer
