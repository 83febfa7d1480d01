"""A sampled answer as the trainer learns from it. Shape legend: `_A` sampled answer tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_rl.types import KeptTokens

_EMPTY = torch.empty(0)
_NO_MASK = torch.empty(0, dtype=torch.bool)


@dataclass(eq=False)
class TrainingSample:
    """A prompt with its answer, and per-token values of the A tokens that the policy sampled (float32 [A], empty where unknown).

    Tokens that an environment wrote are input to the model but have no such values, and nothing is learned from them. Token ids, int32, and
    the mask may be given as lists.
    """

    prompt_ids: torch.Tensor
    response_ids: torch.Tensor
    advantage: float = 0.0
    """Of every token; with `token_advantages` their mean."""
    rollout_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the engine that sampled the answer."""
    old_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the trainer's policy that sampled the answer."""
    reference_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the frozen reference."""
    importance_weights: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Weights of the policy term that correct for the engine (`algorithm.importance_weights`); empty for 1."""
    high_covariance: torch.Tensor = field(default_factory=lambda: _NO_MASK)
    """bool [A]: tokens chosen by `algorithm.covariance`; empty for none."""
    reward: float = 0.0
    """Reward of the answer, before any KL term."""
    excluded: bool = False
    """The answer has no reward: it contributes no gradient and no mean counts it."""
    masked: bool = False
    """The answer contributes no gradient and no mean of the loss counts it; its reward counts in its group."""
    loss_weight: float = 1.0
    """Weight of each sampled token in the loss; 1 everywhere is the mean over tokens (`algorithm.aggregate`)."""
    response_mask: torch.Tensor = field(default_factory=lambda: _NO_MASK)
    """bool: for each answer token, False where an environment wrote it; empty where all were sampled."""
    routed_experts: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Experts that the forward passes replay (`hf.routing_record`), uint8 or int16 [length - 1, layers, k]; empty for none. Either all
    samples of a batch have it or none."""
    number: int = 0
    """Its place among the samples of a step, of all replicas."""
    kept_tokens: KeptTokens | None = None
    """The tokens that each was drawn from, which log-probs are taken over; None for all."""
    token_advantages: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Advantages of the tokens where they differ (`algorithm.gae`, `algorithm.distillation`)."""
    values: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """The critic's value before each token, before the step's updates."""
    returns: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """What the critic learns to predict of each token."""
    version_lags: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Policy versions between the sampling policy and the trainer's, uint8 [A]; empty for 0."""
    teacher_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Log-probs under the teacher."""

    def __post_init__(self) -> None:
        self.prompt_ids, self.response_ids = (torch.as_tensor(ids, dtype=torch.int32) for ids in (self.prompt_ids, self.response_ids))
        self.response_mask = torch.as_tensor(self.response_mask, dtype=torch.bool)

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, int32."""
        return torch.cat([self.prompt_ids, self.response_ids])

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def sampled_count(self) -> int:
        """A."""
        return int(self.response_mask.sum()) if len(self.response_mask) else len(self.response_ids)

    @property
    def advantages(self) -> torch.Tensor:
        """The advantage of every sampled token, float32 [A]."""
        return self.token_advantages if len(self.token_advantages) else torch.full((self.sampled_count,), self.advantage)

    @property
    def target_positions(self) -> torch.Tensor:
        """The positions whose targets are the sampled tokens, int64 [A]: position t predicts token t + 1."""
        positions = torch.arange(len(self.prompt_ids) - 1, self.length - 1)
        return positions[self.response_mask] if len(self.response_mask) else positions
