"""What travels between the parts of the loop.

Shape suffixes, used for names all over the project: `_P` prompts of a step, `_G` members of a group, `_B` sequences of a
batch, `_T` tokens of one sequence. Example: `rewards_G` is the list of rewards of one prompt's completions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # a reward worker imports this file and little else
    import numpy as np


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
    finish_reason: str  # "stop" (end token or stop string sampled) | "length" (cut at max_new_tokens)
    policy_version: int  # the one that sampled the last token
    versions_T: list[int] = field(default_factory=list)  # per token; empty: policy_version sampled all
    routed_experts_T: np.ndarray | None = None  # the routing of all its tokens, prompt included (`routing`), where the engine records it


@dataclass
class Reward:
    """The verdict on one completion. `error` names why no verdict could be had (the sample then scores 0)."""

    value: float
    correct: bool
    error: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """The values of several reward functions before weighting, by label; empty where there is one only, or an error."""
    excluded: bool = False
    """Without a verdict, and to be left out of the training and of its group's mean (`reward.on_error`)."""


@dataclass
class Completion:
    """One sampled answer with all that the trainer, the metrics and the report need. `logprobs_T` is 0 where the environment wrote."""

    problem: Problem
    prompt_ids_T: list[int]
    output_ids_T: list[int]
    logprobs_T: list[float]
    finish_reason: str  # the last turn's, or "turns" (no turn left), "length" (no token left), "environment" (it broke)
    policy_version: int
    text: str
    reward: Reward = field(default_factory=lambda: Reward(0.0, False))
    advantage: float = 0.0
    length_penalty: float = 0.0  # what the length adds to the reward, 0 or less
    response_mask_T: list[bool] = field(
        default_factory=list
    )  # per output token: False where the environment wrote it; empty: all are sampled
    dialogue: list[str] = field(default_factory=list)  # texts of the policy and of the environment in turn; empty without an environment
    routed_experts_T: np.ndarray | None = None  # the engine's routing of prompt and output (`routing`), where it records it
    tool_errors: int = 0  # messages by which the environment refused what the policy asked for
    environment_error: str = ""  # why the environment broke; the sample then scores 0
    versions_T: list[int] = field(default_factory=list)  # per output token, the policy version of its turn; empty: policy_version's all

    @property
    def sampled_count(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.response_mask_T) if self.response_mask_T else len(self.output_ids_T)

    @property
    def num_turns(self) -> int:
        """The policy's; 0 without an environment."""
        return (len(self.dialogue) + 1) // 2

    @property
    def score(self) -> float:
        """What the advantage is computed from."""
        return self.reward.value + self.length_penalty


@dataclass(frozen=True)
class SamplingParams:
    """How to sample: `temperature` divides the logits, 0 takes the most probable token; `max_new_tokens` bounds the answer; `seed` fixes a
    completion's draw (one seed for several completions of one prompt makes them equal), without one it is the engine's; an answer also
    ends with the token that completes one of the strings `stop`, which it keeps."""

    temperature: float
    max_new_tokens: int
    seed: int | None = None
    stop: tuple[str, ...] = ()


class RewardFunction(Protocol):
    """Scores one completion's text against its problem; runs in a worker process, so it must be importable by name."""

    def __call__(self, text: str, problem: Problem) -> Reward: ...
