"""Data types passed between the parts of the loop.

Shape suffixes in names: `_P` prompts of a step, `_G` members of a group, `_B` samples of a batch, `_T` tokens of one sequence. Example:
`rewards_G` is the list of rewards of one prompt's completions. Values of tokens are columns: NumPy arrays, from the engine's answer on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a reward worker imports this file and little else
    import numpy as np

ChatMessage = Mapping[str, Any]
"""A message as chat templates take it: role and content, and tool_calls, tool_call_id, name or reasoning_content where it has them."""


@dataclass(frozen=True)
class Problem:
    """One verifiable question. Example: Problem("arith-3-00017", "12+7-3+9=", "25", level=3, source="arithmetic")."""

    id: str
    prompt: str  # the text given to the policy, template already applied
    answer: str  # the gold answer in the form of the reward function
    level: int = 0  # difficulty; 0 where the data set has none
    source: str = ""
    history: tuple[ChatMessage, ...] = ()  # messages before a bare question; as the next empty once the template is applied
    tools: tuple[Mapping[str, Any], ...] = ()  # that the chat template tells the policy of
    pass_rate: float | None = None  # share of correct answers to it, as the data say


@dataclass(frozen=True)
class KeptTokens:
    """Of A sampled tokens, the tokens that each was drawn from; see `batch.kept_tokens`."""

    counts: np.ndarray  # int32 [A]: how many
    ids: np.ndarray  # int32 [sum of counts]: which, one token's after the other's


@dataclass
class Generation:
    """An engine's output for one prompt. `logprobs_T` are natural logs *after* temperature, one per output token; where `kept_tokens` is
    recorded, of the distribution over those."""

    output_ids_T: np.ndarray  # int32
    logprobs_T: np.ndarray  # float32
    finish_reason: str  # "stop" (end token or stop string sampled) | "length" (cut at max_new_tokens)
    policy_version: int  # of the last token
    versions_T: np.ndarray | None = None  # int32, per token; None where policy_version sampled all
    routed_experts_T: np.ndarray | None = None  # experts of all tokens, prompt included (`hf.routing_record`), if recorded
    kept_tokens: KeptTokens | None = None  # that each token was drawn from, if recorded
    cached_tokens: int = 0  # of the prompt's tokens, those that came from the prefix cache


@dataclass
class Reward:
    """The reward of one completion. `error` says why it could not be computed (the sample then scores 0)."""

    value: float
    correct: bool
    error: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """Values of several reward functions before weighting, by label; empty for a single function or an error."""
    excluded: bool = False
    """No reward could be computed, and the sample is left out of training and of its group's mean (`reward.on_error`)."""
    answer: str | None = None
    """The answer that was read, "" for none: what majority votes count. None where the function does not say."""


@dataclass(eq=False)
class Completion:
    """One sampled answer with the data for trainer, metrics and report. `logprobs_T` is 0 where the environment wrote."""

    problem: Problem
    prompt_ids_T: np.ndarray  # int32
    output_ids_T: np.ndarray  # int32
    logprobs_T: np.ndarray  # float32
    finish_reason: str  # of the last turn, or "turns" (none left), "length" (no token left), "environment" or "agent" (it failed)
    policy_version: int
    text: str
    reward: Reward = field(default_factory=lambda: Reward(0.0, False))
    masked: bool = False  # no gradient of it, though its reward counts in its group
    length_penalty: float = 0.0  # added to the reward, 0 or less
    response_mask_T: np.ndarray | None = None  # bool, False where the environment wrote a token; None: all are sampled
    dialogue: list[str] = field(default_factory=list)  # texts of policy and environment in turn; empty without an environment
    routed_experts_T: np.ndarray | None = None  # experts of prompt and output tokens (`hf.routing_record`), if recorded
    kept_tokens: KeptTokens | None = None  # that each sampled token was drawn from, if recorded
    tool_errors: int = 0  # error messages of the environment to the policy
    environment_error: str = ""  # why the environment, or the agent, failed; the sample then scores 0
    prompt_tokens: int = 0  # of all turns, what came before a turn counted again
    cached_tokens: int = 0  # of those, taken from the engine's prefix cache
    version_lags_T: np.ndarray | None = None  # uint8: versions from an output token's to that it was collected for; None: 0 for all
    branches: list[Completion] = field(default_factory=list)  # an agent's other conversations, which share this one's reward
    calls: int | None = None  # an agent's requests that were answered; None without an agent
    own_reward: float | None = None  # what an agent gave itself

    @property
    def conversations(self) -> list[Completion]:
        """What there is to train on: itself, and an agent's other conversations; none of an agent that asked nothing."""
        return [] if self.calls == 0 else [self, *self.branches]

    @property
    def total_sampled(self) -> int:
        """Number of tokens that the policy sampled in all its conversations."""
        return self.sampled_count + sum(branch.sampled_count for branch in self.branches)

    @property
    def sampled_count(self) -> int:
        """Number of tokens that the policy sampled."""
        return len(self.output_ids_T) if self.response_mask_T is None else int(self.response_mask_T.sum())

    @property
    def num_turns(self) -> int:
        """Number of the policy's turns; 0 without an environment."""
        return (len(self.dialogue) + 1) // 2

    @property
    def score(self) -> float:
        """The reward that the advantage is computed from."""
        return self.reward.value + self.length_penalty


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one completion."""

    temperature: float  # divides the logits; 0 takes the most probable token
    max_new_tokens: int
    seed: int | None = None  # fixes the completion's draw (completions of one prompt with one seed are equal); None: the engine's
    stop: tuple[str, ...] = ()  # the answer ends with the token that completes one of these, and keeps it
    top_p: float = 1.0  # draws from the fewest most probable tokens that hold this share of the probability; 1: all
    top_k: int = -1  # draws from this many most probable tokens; -1: all
    min_p: float = 0.0  # draws from tokens that are at least this share as probable as the most probable one
    record_kept_tokens: bool = False  # the engine tells which tokens these have left to draw from


class RewardFunction(Protocol):
    """Scores one completion's text against its problem; runs in a worker process, so it must be importable by name."""

    def __call__(self, text: str, problem: Problem) -> Reward: ...
