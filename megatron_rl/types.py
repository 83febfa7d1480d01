"""Data types of the training loop.

Suffixes of names give shapes: `_P` prompts of a step, `_G` members of a group, `_B` samples of a batch, `_T` tokens of a sequence. Example:
`rewards_G` is the list of rewards of one prompt's completions. Values per token are NumPy arrays.
"""

from __future__ import annotations

import base64
import datetime
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import UUID

if TYPE_CHECKING:  # reward workers import this file and little else
    import numpy as np

EQUAL_REWARDS = 1e-8
"""Rewards this close, relative to the larger of them and 1, are equal: they differ by rounding errors."""
ChatMessage = Mapping[str, Any]
"""A message in the form of chat templates: role, content, and optionally tool_calls, tool_call_id, name and reasoning_content."""


@dataclass(frozen=True)
class Problem:
    """A verifiable question. Example: Problem("arith-3-00017", "12+7-3+9=", "25", level=3, source="arithmetic")."""

    id: str
    prompt: str  # text given to the policy, with the template applied
    answer: str  # gold answer, in the form that the reward function expects
    level: int = 0  # difficulty, or 0 if unknown
    source: str = ""  # label of the data set
    history: tuple[ChatMessage, ...] = ()  # messages before a bare question; empty once the template is applied
    tools: tuple[Mapping[str, Any], ...] = ()  # tools for the chat template; empty once the template is applied
    pass_rate: float | None = None  # fraction of correct answers according to the data, or None if unknown
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The row that the problem was read from (`data.keep_columns`), typed as in the file. Empty for generated problems."""
    text_positions: tuple[int, ...] = ()  # marks of text in the prompt that looks like a control token (`hf.special_text.put_marks`)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, except `text_positions`, as JSON values: NaN and infinities become null, and dates, decimals and bytes become
        text."""
        return {name: as_json(value) for name, value in vars(self).items() if name != "text_positions"}


@dataclass(frozen=True)
class Episode(Problem):
    """A problem with which an environment or an agent begins an episode, and what travels between the turns of an environment."""

    seed: int = 0
    """Seed of the completion, from which the random numbers of Python, NumPy and torch are seeded: a resumed run repeats the episode."""
    turn: int = 0  # number of turns that the environment has answered
    state: bytes = b""  # the pickled environment; empty before the first turn


def as_json(value: Any) -> Any:
    """Return a value of a row as JSON values; see `Problem.to_json`. Raise TypeError for other objects."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal | UUID):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy
        return as_json(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that each of A sampled tokens was drawn from; see `batch.kept_tokens`."""

    counts: np.ndarray  # int32 [A]: number of kept tokens
    ids: np.ndarray  # int32 [sum of counts]: ids of kept tokens, concatenated


ColumnPlace = Literal["here", "but_text", "remote"]
"""Where an engine that can keep columns, the values per token of a completion, may leave them: all come with its answer; the text does, and
the engine keeps the columns; or the engine keeps both and scores the text."""


@dataclass(frozen=True)
class RemoteColumns:
    """The columns of a completion that its engine keeps until a replica fetches them, and what rank 0 needs to know of them."""

    url: str  # of the engine
    key: str = field(repr=False)
    handle: str
    tokens: int
    digest: str  # of the token ids
    logprob_sum: float
    versions: tuple[int, ...]  # policy versions of the tokens, ascending
    trained_at: int | None = None  # policy version from which the tokens' `version_lags` count, or None for no lags
    prompt_tokens: int = 0
    has_text: bool = False  # whether the engine keeps the text, too


def are_equal(rewards: Iterable[float]) -> bool:
    """Return whether rewards differ by rounding errors only, such as sums in another order, so that nothing can be learned from them."""
    rewards = [*rewards]
    return not rewards or max(rewards) - min(rewards) <= EQUAL_REWARDS * max(1.0, *map(abs, rewards))


def group_by_engine(columns_B: Iterable[RemoteColumns]) -> dict[tuple[str, str], list[RemoteColumns]]:
    """Return the columns of each engine, by its url and key."""
    groups: dict[tuple[str, str], list[RemoteColumns]] = {}
    for columns in columns_B:
        groups.setdefault((columns.url, columns.key), []).append(columns)
    return groups


@dataclass
class Generation:
    """An engine's output for one prompt."""

    output_ids_T: np.ndarray  # int32
    logprobs_T: np.ndarray  # float32: natural logs after temperature, normalized over `kept_tokens` if recorded
    finish_reason: str  # "stop" (sampled an end token or stop string) | "length" (reached max_new_tokens)
    policy_version: int  # of the last token
    versions_T: np.ndarray | None = None  # int32: policy version of each token, or None if all are from policy_version
    routed_experts_T: np.ndarray | None = None  # experts of prompt and output tokens (`hf.routing_record`), if recorded
    kept_tokens: KeptTokens | None = None  # if recorded
    cached_tokens: int = 0  # number of prompt tokens from the prefix cache
    remote: RemoteColumns | None = None  # if set, all arrays are empty or None
    text: str | None = None
    """What `decode_completion` returns for `Config.text_markers` and the request's stop texts, "" if the engine keeps it, or None if the
    engine decodes no texts."""
    prompt_ids_T: np.ndarray | None = None  # int32: of a completion that the engine has kept
    seed: int | None = None  # with which `batch.draws` gives the random number of each token; None if the engine draws in another way


@dataclass
class Reward:
    """The reward of one completion."""

    value: float
    correct: bool
    error: str = ""  # why the reward could not be computed; `value` is 0 then
    parts: dict[str, float] = field(default_factory=dict)
    """Unweighted values by label if there are several reward functions. Empty after an error."""
    excluded: bool = False
    """Whether the sample is excluded from training and from its group's mean because its reward failed (`reward.on_error`)."""
    answer: str | None = None
    """Extracted answer for majority votes, "" if there is none. None if the reward function does not extract answers."""


@dataclass
class Scored:
    """What an engine says of a completion whose text it keeps."""

    reward: Reward  # before `reward.on_error`
    thought_share: float
    unfinished: bool  # whether the completion ends inside its thought


@dataclass(eq=False)
class Completion:
    """A sampled response with its data for training, metrics and report."""

    problem: Problem
    prompt_ids_T: np.ndarray  # int32
    output_ids_T: np.ndarray  # int32
    logprobs_T: np.ndarray  # float32, 0 for tokens of the environment
    finish_reason: str  # of the last turn, or "turns" or "length" (limit reached), "environment" or "agent" (failed)
    policy_version: int
    text: str
    reward: Reward = field(default_factory=lambda: Reward(0.0, False))
    answer_text: str | None = ""  # `text` without the thought, or None if the thought is unfinished
    thought: str = ""  # what the policy thought (`reward.thinking`)
    thought_share: float = 0.0  # of the text's characters
    masked: bool = False  # excluded from the loss, but its reward counts in its group
    length_penalty: float = 0.0  # added to the reward, 0 or negative
    response_mask_T: np.ndarray | None = None  # bool, False for tokens of the environment, or None if all tokens are sampled
    dialogue: list[str] = field(default_factory=list)  # alternating texts of policy and environment; empty without an environment
    routed_experts_T: np.ndarray | None = None  # experts of prompt and output tokens (`hf.routing_record`), if recorded
    kept_tokens: KeptTokens | None = None  # of the sampled tokens, if recorded
    remote: RemoteColumns | None = None
    """If set, all arrays but `prompt_ids_T` are empty or None. If it has the text, the texts are only read for the report."""
    tool_errors: int = 0  # number of the environment's error messages to the policy
    environment_error: str = ""  # why the environment or agent failed; the sample's score is 0 then
    prompt_tokens: int = 0  # total over all turns; each turn counts all tokens before it
    cached_tokens: int = 0  # of `prompt_tokens`, from the prefix cache
    seeds: list[int] = field(default_factory=list)  # see `TrainingSample.seeds`
    version_lags_T: np.ndarray | None = None  # uint8: number of policy versions since each token was sampled, or None for all 0
    branches: list[Completion] = field(default_factory=list)  # other conversations of an agent, with the same reward
    shared_count: int = 0  # number of sampled tokens that this conversation shares with an earlier one, which trains on them
    calls: int | None = None  # number of an agent's requests that were answered, or None without an agent
    dropped_calls: int = 0  # number of its requests whose response nobody received
    own_reward: float | None = None  # reward that an agent returned, or None
    foreign_histories: int = 0  # number of an agent's requests whose history resembles a conversation, but does not continue it
    history_notes: list[str] = field(default_factory=list)  # why the first of them do not

    @property
    def conversations(self) -> list[Completion]:
        """Conversations to train on: this one and its branches, or none if an agent made no calls."""
        return [] if self.calls == 0 else [self, *self.branches]

    @property
    def total_sampled(self) -> int:
        """Number of sampled tokens in this conversation and its branches."""
        return self.sampled_count + sum(branch.sampled_count for branch in self.branches)

    @property
    def longest_sampled(self) -> int:
        """Number of sampled tokens in the longest conversation, which `rollout.max_new_tokens` limits."""
        return max(each.sampled_count + each.shared_count for each in (self, *self.branches))

    @property
    def sampled_count(self) -> int:
        """Number of sampled tokens in this conversation."""
        if self.remote is not None:
            return self.remote.tokens
        return len(self.output_ids_T) if self.response_mask_T is None else int(self.response_mask_T.sum())

    @property
    def num_turns(self) -> int:
        """Number of turns of the policy, or 0 without an environment."""
        return (len(self.dialogue) + 1) // 2

    @property
    def score(self) -> float:
        """Reward with the length penalty, from which the advantage is computed."""
        return self.reward.value + self.length_penalty


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of one completion."""

    temperature: float  # divides the logits; 0 selects the most probable token
    max_new_tokens: int
    seed: int | None = None  # equal seeds give equal completions of a prompt; None uses the engine's seed
    stop: tuple[str, ...] = ()  # strings that end the response; the token that completes one is kept
    top_p: float = 1.0  # samples from the fewest tokens with this total probability; 1 disables it
    top_k: int = -1  # samples from this many of the most probable tokens; -1 disables it
    min_p: float = 0.0  # minimum probability of a token, relative to the most probable token
    record_kept_tokens: bool = False  # whether the engine reports the tokens that remain after these filters
    columns: ColumnPlace = "here"


class RewardFunction(Protocol):
    """Scores the text of a completion. It runs in a worker process, so it must be importable by name."""

    def __call__(self, text: str, problem: Problem) -> Reward: ...
