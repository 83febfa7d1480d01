"""An episode: the tree of turns in which one agent queried the policy about one problem.

    system, user, [a], tool, [b]              a request that extends a response continues after the tokens of that response
                  [a], tool, [b], user, [c]
             user', [d]                       a request with a different history begins another branch where they differ

A path from the root to a leaf is a conversation and becomes a training sample. Conversations may share their first turns. Each sampled
token is trained on once, in the first sample that holds it, and only read in the other samples. A response that nobody received, because
its client had left, is no turn of a conversation, unless a later request continues it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import cast

import numpy as np

from megatron_rl.batch.draws import UNKNOWN
from megatron_rl.batch.kept_tokens import extend_kept_tokens
from megatron_rl.config.agent import AgentConfig
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.messages import TEXT, ConversationMessage, PolicyRequest, RefusedError
from megatron_rl.rollout.engine import Abort, hash_seed
from megatron_rl.rollout.turns import append_tokens
from megatron_rl.types import Completion, Generation, Problem, SamplingParams

CHARACTERS_PER_TOKEN = 32
"""Maximum mean number of characters in a token. A longer conversation is refused before it is tokenized, which takes time."""
_MOST_NOTES = 8  # number of notes about histories that an episode's record holds
_MOST_REFUSALS = 16  # number of requests beyond its limits after which an agent is killed, because it might go on forever


@dataclass(eq=False)
class Turn:
    """A request, and once it is sampled, the policy's response, at its place in the tree."""

    number: int  # of the request in its episode
    parent: Turn | None
    request: PolicyRequest  # its messages are those of the parent and what follows, so that memory grows with their number only
    given_ids_T: np.ndarray  # tokens between the parent's response and this one (int32); for the first turn, the whole prompt
    prompt_ids_T: np.ndarray  # all tokens before the response; empty once it is sampled
    prompt_tokens: int  # their number
    sampling: SamplingParams
    is_awaited: Callable[[], bool]  # whether a client waits for the response
    answered: int = 0  # when a client last received the response, as its number among the episode's answers; 0 if none has
    messages: tuple[ConversationMessage, ...] = ()  # the conversation, including the response
    generation: Generation = field(init=False)
    stop: str = ""  # the stop text that ended the response, or "" if the end token or the limit did
    malformed: bool = False  # whether the policy tried to call a tool incorrectly

    @property
    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns, turn = list[Turn](), cast(Turn | None, self)
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def start(self) -> int:
        """Number of messages that the turn shares with its parent."""
        return len(self.parent.messages) if self.parent else 0

    @property
    def text(self) -> str:
        """The conversation of a text completion as one text."""
        return "".join(text for turn in self.path for text in (*(each.content for each in turn.messages[turn.start :]), turn.stop))


class AgentEpisode:
    """The turns of one agent. Requests come from several threads and are refused once the episode has ended."""

    def __init__(
        self,
        problem: Problem,
        sampling: SamplingParams,
        version: int,
        staleness: int,
        config: AgentConfig,
        format: ChatFormat,
        abort: Abort | None = None,
    ) -> None:
        self.problem, self.sampling, self.version, self.staleness = problem, sampling, version, staleness
        self.abort = abort or Abort()
        self._config, self._format, self._lock = config, format, threading.Lock()
        self._requests: list[Turn] = []  # all that were planned
        self._turns: list[Turn] = []  # those that were sampled
        self._begun: set[Turn | None] = set()  # turns that another turn continues
        self._branches = self._refusals = 0
        self._answers, self._ended = count(1), False
        self.foreign = 0  # number of requests whose history continues no conversation, though it resembles one
        self.notes: list[str] = []  # why the first of them do not
        self.limit = ""  # finish reason of the first limit that refused a request
        self.failure: Exception | None = None  # an error of the run, not of the agent
        self.kill: Callable[[], None] = lambda: None  # kills the agent processes

    def plan(self, request: PolicyRequest, is_awaited: Callable[[], bool] = lambda: True) -> Turn:
        """Return the turn that answers a request, to be sampled. Raise RefusedError if a limit is reached or the template fails on its
        messages."""
        with self._lock:
            self._check_end()
            self._check_size(request)
            request, parent, given_ids_T, prompt_ids_T = self._encode(request)
            self._note_history(request, parent)
            sampled = sum(len(turn.generation.output_ids_T) for turn in parent.path) if parent else 0
            room = min(self.sampling.max_new_tokens - sampled, self._config.max_tokens - len(prompt_ids_T))
            if sum(turn.answered > 0 or turn.is_awaited() for turn in self._requests) >= self._config.max_calls:
                self._refuse("turns", f"agent.max_calls = {self._config.max_calls} responses were given", "max_calls_reached")
            if room < 1:
                text = f"the conversation of {len(prompt_ids_T)} tokens, {sampled} sampled, leaves no room (agent.max_tokens = "
                text += f"{self._config.max_tokens}, rollout.max_new_tokens = {self.sampling.max_new_tokens})"
                self._refuse("length", text, "context_length_exceeded")
            stop, most = self.sampling.stop + request.stop, min(room, request.max_tokens or room)
            sampling = replace(self.sampling, seed=self._choose_seed(parent), stop=stop, max_new_tokens=most)
            number, tokens = len(self._requests), len(prompt_ids_T)
            turn = Turn(number, parent, request, given_ids_T, prompt_ids_T, tokens, sampling, is_awaited)
            self._requests.append(turn)
            return turn

    def count_tokens(self, request: PolicyRequest) -> int:
        """Return the number of tokens with which the policy would be asked to answer a request. Raise RefusedError like `plan`."""
        with self._lock:
            self._check_end()
            self._check_size(request)
            return len(self._encode(request)[3])

    def add(self, turn: Turn, generation: Generation, said: ConversationMessage, malformed: bool = False, stop: str = "") -> None:
        """Record the response to a request. `said`: with tool calls without ids. `malformed`, `stop`: see `Turn`."""
        with self._lock:
            self._check_end()
            number = sum(len(other.messages[-1].tool_calls) for other in self._turns)
            calls = tuple(replace(call, id=f"call{number + index:05d}") for index, call in enumerate(said.tool_calls))
            turn.generation, turn.malformed, turn.stop, turn.prompt_ids_T = generation, malformed, stop, turn.given_ids_T[:0]
            turn.messages = (*turn.request.messages, replace(said, tool_calls=calls))
            self._turns.append(turn)

    def receive(self, turn: Turn) -> None:
        """Record that a client is given the response."""
        turn.answered = next(self._answers)

    def find_turn(self, response: str) -> Turn:
        """Return the turn of a response's id, `resp_N`. Raise RefusedError if it does not exist."""
        with self._lock:
            for turn in self._turns:
                if response == f"resp_{turn.number}" and turn.messages[0].role != TEXT:
                    return turn
        raise RefusedError("previous_response_id: is not a response of this episode", 404, "previous_response_not_found")

    def fail(self, error: Exception) -> None:
        """Record an error of the run, and kill the agent."""
        with self._lock:
            self.failure = self.failure or error
        self.kill()

    def finish(self, error: str, own_reward: float | None) -> Completion:
        """End the episode and return the conversation that its last answered request belongs to, with the other conversations as
        `branches`. `error`: why the agent failed."""
        with self._lock:
            self._ended = True
            turns = [turn for turn in self._turns if turn.answered]
        error = "" if self.limit else error
        parents = {turn.parent for turn in turns}
        leaves = [turn for turn in turns if turn not in parents]
        trained: set[Turn] = set()
        main = max(leaves, key=lambda leaf: (max(turn.answered for turn in leaf.path), leaf.answered), default=None)
        leaves.sort(key=lambda leaf: leaf is not main)  # the others stay in order
        conversations = [self._build(leaf.path, trained) for leaf in leaves] or [self._build([], trained)]
        completion = conversations[0]
        completion.branches = conversations[1:]
        completion.calls, completion.dropped_calls = len(turns), len(self._requests) - len(turns)
        completion.tool_errors = sum(turn.malformed for turn in turns)
        completion.prompt_tokens = sum(turn.prompt_tokens for turn in turns)
        completion.cached_tokens = sum(turn.generation.cached_tokens for turn in turns)
        completion.finish_reason = "agent" if error else self.limit or completion.finish_reason or "stop"
        completion.environment_error = error
        completion.foreign_histories, completion.history_notes = self.foreign, self.notes
        is_cut = bool(self.limit) and own_reward is None and self._config.own_reward
        completion.own_reward = 0.0 if is_cut else own_reward
        return completion

    def _encode(self, request: PolicyRequest) -> tuple[PolicyRequest, Turn | None, np.ndarray, np.ndarray]:
        """Return a request that continues a text as one, the turn that it continues, the tokens behind that, and all tokens."""
        if request.messages[0].role == TEXT:
            request = self._divide(request)
        parent = self._find_parent(request)
        for turn in parent.path if parent else ():
            turn.answered = turn.answered or next(self._answers)  # who continues a response has received it
        if parent is None:
            given_ids_T = self._format.encode_start(request.messages, request.tools)
            return request, None, given_ids_T, given_ids_T
        rest, calls = request.messages[len(parent.messages) :], parent.messages[-1].tool_calls
        given_ids_T = self._format.encode_rest(rest, request.tools, parent.generation.output_ids_T, calls)
        request = replace(request, messages=parent.messages + rest)
        earlier = [part for turn in parent.path for part in (turn.given_ids_T, turn.generation.output_ids_T)]
        return request, parent, given_ids_T, np.concatenate([*earlier, given_ids_T])

    def _divide(self, request: PolicyRequest) -> PolicyRequest:
        """Return a request for a text that begins with an earlier text and its response as one that continues the response. A response that
        the end token has ended cannot be continued, because the text does not have this token."""
        (text,) = request.messages
        texts = [turn for turn in self._turns if turn.messages[0].role == TEXT]
        found = [turn for turn in texts if len(turn.text) < len(text.content) and text.content.startswith(turn.text)]
        unended = [turn for turn in found if not len(self._format.split_end(turn.generation.output_ids_T)[1])]
        if not unended:
            return request
        turn = max(unended, key=lambda turn: len(turn.text))
        return replace(request, messages=(*turn.messages, replace(text, content=text.content[len(turn.text) :])))

    def _find_parent(self, request: PolicyRequest) -> Turn | None:
        """Return the turn with the longest conversation that the request begins with in meaning. If several are equally long, one
        of the very same texts comes first, then one that a client has received, then the earliest."""
        fitting = dict[Turn | None, bool]({None: True})  # with whether the texts are the same
        for turn in self._turns:  # parents come before their children
            if turn.parent in fitting and turn.request.tools == request.tools and self._is_continued(turn, request):
                part = slice(turn.start, len(turn.messages))
                fitting[turn] = fitting[turn.parent] and request.messages[part] == turn.messages[part]
        del fitting[None]
        return max(fitting, key=lambda turn: (len(turn.messages), fitting[turn], turn.answered > 0) if turn else (), default=None)

    def _is_continued(self, turn: Turn, request: PolicyRequest) -> bool:
        """Return whether a request that continues the turn's parent also continues the turn. What the policy sampled is compared by its
        meaning. For what it was given, the chat template must also write the same text, from which the turn's tokens were made."""
        end = len(turn.messages) - 1
        given, known = request.messages[turn.start : end], turn.messages[turn.start : end]
        if len(request.messages) <= end + 1 or _find_difference(request.messages[turn.start :], turn.messages[turn.start :])[1]:
            return False
        return given == known or self._format.writes_same(given, known, turn.request.tools, turn.parent is None)

    def _note_history(self, request: PolicyRequest, parent: Turn | None) -> None:
        """Count a request that repeats responses of the policy but does not continue them, and note why."""
        path = parent.path if parent else []
        if not self._turns or not any(message.role == "assistant" for message in request.messages[len(path[-1].messages) if path else 0 :]):
            return

        def rate(turn: Turn) -> tuple[bool, int]:
            number = _find_difference(request.messages, turn.messages)[0]
            return number == len(turn.messages) and turn not in path, number

        closest = max(self._turns, key=rate)
        number, difference = _find_difference(request.messages, closest.messages)
        said = [turn.messages[-1] for turn in self._turns]
        if number == len(closest.messages):
            same = closest.request.tools == request.tools
            note = "the chat template writes the names, ids, or blanks that differ" if same else "the tools differ"
        elif any(message.role == "assistant" for message in request.messages[number:]) and (
            number or any(not message.differs_from(each) for message in request.messages for each in said)
        ):
            note = f"message {number} ({request.messages[number].role}): {difference}"
        else:  # examples that the agent wrote
            return
        self.foreign += 1
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(note)

    def _choose_seed(self, parent: Turn | None) -> int | None:
        """Return the seed of the turn's conversation, or a new one for a new branch. The first conversation has the episode's seed."""
        if parent is not None and parent not in self._begun:
            self._begun.add(parent)
            return parent.sampling.seed
        number, self._branches = self._branches, self._branches + 1
        if number == 0 or self.sampling.seed is None:
            return self.sampling.seed
        return hash_seed(self.sampling.seed, number)

    def _check_end(self) -> None:
        if self._ended:
            raise RefusedError("this episode has ended", 401, "invalid_api_key")

    def _check_size(self, request: PolicyRequest) -> None:
        if request.size > (most := CHARACTERS_PER_TOKEN * self._config.max_tokens):
            text = f"the conversation of {request.size} characters is longer than {most} (agent.max_tokens = {self._config.max_tokens})"
            self._refuse("length", text, "context_length_exceeded")

    def _refuse(self, finish_reason: str, text: str, code: str) -> None:
        self.limit = self.limit or finish_reason
        self._refusals += 1
        if self._refusals == _MOST_REFUSALS:
            self.kill()
        raise RefusedError(text, 400, code)

    def _build(self, path: list[Turn], trained: set[Turn]) -> Completion:
        """Return a conversation as a completion. Turns in `trained` are only read; the conversation's turns are added to `trained`."""
        empty_T, prompt_ids_T = np.empty(0, np.int32), path[0].given_ids_T if path else np.empty(0, np.int32)
        completion = Completion(self.problem, prompt_ids_T, empty_T, np.empty(0, np.float32), "", self.version, "")
        completion.response_mask_T = np.empty(0, bool)

        def append(ids_T: np.ndarray, logprobs_T: np.ndarray | None, versions_T: np.ndarray | int) -> None:
            lags_T = np.full(len(ids_T), self.version - versions_T, np.uint8) if self.staleness else None
            append_tokens(completion, ids_T, logprobs_T, lags_T, self._format.decode(ids_T))

        for turn in path:
            generation, ids_T, is_new = turn.generation, turn.generation.output_ids_T, turn not in trained
            if turn.parent:
                append(turn.given_ids_T, None, self.version)
            versions_T = generation.policy_version if generation.versions_T is None else generation.versions_T
            append(ids_T, generation.logprobs_T if is_new else None, versions_T if is_new else self.version)
            completion.routed_experts_T = extend_routing_record(completion.routed_experts_T, generation.routed_experts_T)
            if is_new:
                completion.seeds += [len(ids_T), UNKNOWN if generation.seed is None else generation.seed]
                completion.kept_tokens = extend_kept_tokens(completion.kept_tokens, generation.kept_tokens)
            else:
                completion.shared_count += len(ids_T)
            completion.finish_reason, completion.policy_version = generation.finish_reason, generation.policy_version
        if path:
            said, last = path[-1].messages[-1], path[-1]
            completion.text = self._format.mark_thought(said.thought, said.content, last.given_ids_T, last.generation.output_ids_T)
        trained.update(path)
        return completion


def _find_difference(messages: Sequence[ConversationMessage], others: Sequence[ConversationMessage]) -> tuple[int, str]:
    """Return the number of first messages that mean the same, up to the end of the shorter sequence, and how the next ones
    differ, or ""."""
    for number, (one, other) in enumerate(zip(messages, others, strict=False)):
        if difference := one.differs_from(other):
            return number, difference
    return min(len(messages), len(others)), ""
