"""Training samples: a prompt, a sampled response, and per-token values. Shape legend: `_A` sampled response tokens."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from megatron_rl.types import KeptTokens, RemoteColumns

_EMPTY = torch.empty(0)
_NO_MASK = torch.empty(0, dtype=torch.bool)
_NO_SEEDS = torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class TrainingSample:
    """A prompt with its response, and per-token values of the A tokens that the policy sampled (float32 [A], or empty if unknown). Tokens
    of an environment are model input without such values. Token ids, int32, and the mask may be passed as lists."""

    prompt_ids: torch.Tensor
    response_ids: torch.Tensor
    advantage: float = 0.0  # advantage of every token, or the mean of `token_advantages`
    rollout_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)  # log-probs under the engine that sampled the response
    old_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """log-probs under the trainer's version of the policy that sampled the response"""
    reference_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)  # log-probs under the frozen reference model
    importance_weights: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Weights that correct the policy loss for the engine (`algorithm.importance_weights`); empty means 1."""
    high_covariance: torch.Tensor = field(default_factory=lambda: _NO_MASK)
    """bool [A]: tokens selected by `algorithm.covariance`; empty means none."""
    reward: float = 0.0  # reward of the response, before any KL term
    excluded: bool = False  # the response has no reward. It contributes no gradient and is not counted in any mean.
    masked: bool = False  # the response contributes no gradient and is not counted in means of the loss. Its reward counts in its group.
    loss_weight: float = 1.0  # weight of each sampled token in the loss (`algorithm.aggregate`); 1 for all samples is the mean over tokens
    response_mask: torch.Tensor = field(default_factory=lambda: _NO_MASK)
    """bool, one per response token: False if an environment wrote the token. Empty if all were sampled."""
    routed_experts: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Experts that forward passes replay (`hf.routing_record`), uint8 or int16 [length - 1, layers, k]; or empty for all samples."""
    number: int = 0  # index among the samples of a step, over all replicas
    kept_tokens: KeptTokens | None = None
    """Tokens that each token was drawn from, over which log-probs are normalized; None means all tokens."""
    token_advantages: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Advantages of single tokens, if they differ (`algorithm.gae`, `algorithm.distillation`)."""
    values: torch.Tensor = field(default_factory=lambda: _EMPTY)  # the critic's value before each token, computed before the step's updates
    returns: torch.Tensor = field(default_factory=lambda: _EMPTY)  # the critic's regression targets
    version_lags: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """Number of policy versions between sampling and training, uint8 [A]; empty means 0."""
    teacher_logprobs: torch.Tensor = field(default_factory=lambda: _EMPTY)  # log-probs under the teacher model
    seeds: torch.Tensor = field(default_factory=lambda: _NO_SEEDS)
    """int64: the sampled tokens of each turn and the seed that they were drawn with (`batch.draws`), alternating; empty if unknown."""
    draws: torch.Tensor = field(default_factory=lambda: _EMPTY)
    """float64 [A, 2]: the engine's random number of each token, or -1; the trainer's own, or NaN if the token is not checked."""
    remote: RemoteColumns | None = None  # if set, the engine keeps prompt, response, and all values of tokens, which are empty here

    def __post_init__(self) -> None:
        self.prompt_ids, self.response_ids = (torch.as_tensor(ids, dtype=torch.int32) for ids in (self.prompt_ids, self.response_ids))
        self.response_mask = torch.as_tensor(self.response_mask, dtype=torch.bool)

    @property
    def ids(self) -> torch.Tensor:
        """All tokens, int32."""
        return torch.cat([self.prompt_ids, self.response_ids])

    @property
    def length(self) -> int:
        if self.remote is not None:
            return self.remote.prompt_tokens + self.remote.tokens
        return self.prompt_ids.numel() + self.response_ids.numel()  # `len` of a tensor is slow

    @property
    def sampled_count(self) -> int:
        """Number of sampled tokens, A."""
        if self.remote is not None:
            return self.remote.tokens
        return int(self.response_mask.sum()) if self.response_mask.numel() else self.response_ids.numel()

    @property
    def advantages(self) -> torch.Tensor:
        """Advantages of the sampled tokens, float32 [A]."""
        return self.token_advantages if len(self.token_advantages) else torch.full((self.sampled_count,), self.advantage)

    @cached_property
    def target_positions(self) -> torch.Tensor:
        """Positions that predict the sampled tokens, int64 [A]: position t predicts token t + 1."""
        positions = torch.arange(self.prompt_ids.numel() - 1, self.length - 1)
        return positions[self.response_mask] if self.response_mask.numel() else positions
