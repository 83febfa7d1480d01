"""What travels between the parts of the loop.

Shape suffixes, used for names all over the project: `_P` prompts of a step, `_G` members of a group, `_B` sequences of a
batch, `_T` tokens of one sequence. Example: `rewards_G` is the list of rewards of one prompt's completions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One verifiable question. Example: Problem("arith-3-00017", "12+7-3+9=", "25", level=3, source="arithmetic")."""

    id: str
    prompt: str  # the text given to the policy, template already applied
    answer: str  # the gold answer as the reward function wants it
    level: int = 0  # difficulty; 0 where the data set has none
    source: str = ""


@dataclass
class Generation:
    """What an engine returns for one prompt. `logprobs_T` are natural logs *after* temperature, one per output token."""

    output_ids_T: list[int]
    logprobs_T: list[float]
    finish_reason: str  # "stop" (end token sampled) | "length" (cut at max_new_tokens)
    policy_version: int


@dataclass
class Reward:
    """The verdict on one completion. `error` names why no verdict could be had (the sample then scores 0)."""

    value: float
    correct: bool
    error: str = ""


@dataclass
class Completion:
    """One sampled answer with all that the trainer, the metrics and the report need."""

    problem: Problem
    prompt_ids_T: list[int]
    output_ids_T: list[int]
    logprobs_T: list[float]
    finish_reason: str
    policy_version: int
    text: str
    reward: Reward = field(default_factory=lambda: Reward(0.0, False))
    advantage: float = 0.0
    overlong: float = 0.0  # what the length adds to the reward, 0 or less

    @property
    def score(self) -> float:
        """What the advantage is computed from."""
        return self.reward.value + self.overlong


@dataclass(frozen=True)
class Sampling:
    """How to sample: `temperature` > 0 divides the logits; `max_new_tokens` bounds the answer; `seed` fixes a completion's
    draw (one seed for several completions of one prompt makes them equal); without one it is the engine's."""

    temperature: float
    max_new_tokens: int
    seed: int | None = None


class RewardFunction(Protocol):
    """Scores one completion's text against its problem; runs in a worker process, so it must be importable by name."""

    def __call__(self, text: str, problem: Problem) -> Reward: ...
