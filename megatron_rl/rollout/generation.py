"""Sampling of completions with one or more turns: the engine samples, the environment replies, and the engine continues. Sampled text is
never tokenized again, so the trainer scores the tokens that the engine drew."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_rl.batch.draws import UNKNOWN
from megatron_rl.batch.kept_tokens import extend_kept_tokens
from megatron_rl.config import Config
from megatron_rl.config.data import DataConfig
from megatron_rl.hf.prompt_tokens import encode_prompt
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.hf.special_text import put_marks
from megatron_rl.observability import hang_watchdog
from megatron_rl.rewards.thinking import ThoughtMarkers, decode_completion
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.messages import RefusedError
from megatron_rl.rollout.engine import Abort, Engine, check_versions, cut_at_stop
from megatron_rl.rollout.environments.pool import EnvironmentPool, check_environment
from megatron_rl.rollout.turns import append_tokens
from megatron_rl.types import Completion, Episode, Problem, SamplingParams


@dataclass
class _Dialogue:
    """A completion in progress."""

    completion: Completion
    episode: Episode
    sampling: SamplingParams
    version: int  # policy version for which it is collected
    staleness: int  # number of preceding versions that may also sample it
    abort: Abort | None


class Sampler(Protocol):
    """Makes completions of problems."""

    def sample(
        self, problems_B: list[Problem], samplings_B: list[SamplingParams], version: int, staleness: int = 0, abort: Abort | None = None
    ) -> list[Completion]:
        """Return one unscored completion per problem, in order. Thread-safe. Raise RunError if a token was sampled by a policy version
        other than `version` or the `staleness` versions before it, and AbortedError once `abort` is requested."""

    def close(self) -> None:
        """Begin no further completion, and terminate whatever does not end with the engines."""


class MultiTurnSampler:
    """Samples completions of one turn, or of several with `environments`. `data`: settings of prompts. `markers`: the markers of thoughts,
    or None for the chat template's own."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        environments: EnvironmentPool | None = None,
        data: DataConfig | None = None,
        markers: ThoughtMarkers | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._environments, self._markers = engine, tokenizer, environments, markers
        self._format = ChatFormat(tokenizer, data or DataConfig()) if environments is not None else None
        self._chat = data is not None and data.chat

    def sample(
        self, problems_B: list[Problem], samplings_B: list[SamplingParams], version: int, staleness: int = 0, abort: Abort | None = None
    ) -> list[Completion]:
        """See `Sampler.sample`. `max_new_tokens` limits all turns of a completion together."""
        if self._environments is not None:
            samplings_B = [replace(params, stop=params.stop + self._environments.stop) for params in samplings_B]
        prompts_B = [put_marks(problem.prompt, problem.text_positions) for problem in problems_B]
        encoded = {prompt: np.array(encode_prompt(self._tokenizer, prompt, self._chat), np.int32) for prompt in dict.fromkeys(prompts_B)}
        dialogues = []
        for problem, params, prompt in zip(problems_B, samplings_B, prompts_B, strict=True):
            completion = Completion(problem, encoded[prompt], np.empty(0, np.int32), np.empty(0, np.float32), "", version, "")
            dialogues.append(_Dialogue(completion, Episode(**vars(problem), seed=params.seed or 0), params, version, staleness, abort))
        if self._environments is None:
            self._sample_turn(dialogues)
        else:
            with ThreadPoolExecutor(max(len(dialogues), 1), thread_name_prefix="megatron-rl-dialogue") as threads:
                list(threads.map(self._converse, dialogues))
        for dialogue in dialogues:
            completion = dialogue.completion
            completion.text = "".join([*completion.dialogue[:-1], cut_at_stop(completion.text, dialogue.sampling.stop)[0]])
        return [dialogue.completion for dialogue in dialogues]

    def close(self) -> None:
        """Do nothing. Running requests end with the engines."""

    def _converse(self, dialogue: _Dialogue) -> None:
        self._sample_turn([dialogue])
        while self._step_environment(dialogue):
            self._sample_turn([dialogue])

    def _sample_turn(self, running: list[_Dialogue]) -> None:
        """Sample the next turn of every dialogue."""
        hang_watchdog.enter_phase("generate")
        prompts = [np.concatenate([dialogue.completion.prompt_ids_T, dialogue.completion.output_ids_T]) for dialogue in running]
        samplings = [
            replace(dialogue.sampling, max_new_tokens=dialogue.sampling.max_new_tokens - dialogue.completion.sampled_count)
            for dialogue in running
        ]
        generations = self._engine.generate(prompts, samplings, running[0].abort)
        for dialogue, prompt, generation in zip(running, prompts, generations, strict=True):
            check_versions(generation, dialogue.version, dialogue.staleness)
            completion = dialogue.completion
            completion.finish_reason, completion.policy_version = generation.finish_reason, generation.policy_version
            completion.text = generation.text if generation.text is not None else self._decode(dialogue, generation.output_ids_T)
            if generation.remote is not None:
                completion.remote = replace(generation.remote, trained_at=dialogue.version if dialogue.staleness else None)
                completion.output_ids_T = generation.output_ids_T
            else:
                self._append_tokens(dialogue, completion.text, generation.output_ids_T, generation.logprobs_T, generation.versions_T)
            count = len(generation.output_ids_T) if generation.remote is None else generation.remote.tokens
            completion.seeds += [count, UNKNOWN if generation.seed is None else generation.seed]
            completion.routed_experts_T = extend_routing_record(completion.routed_experts_T, generation.routed_experts_T)
            completion.kept_tokens = extend_kept_tokens(completion.kept_tokens, generation.kept_tokens)
            completion.prompt_tokens += len(prompt)
            completion.cached_tokens += generation.cached_tokens

    def _step_environment(self, dialogue: _Dialogue) -> bool:
        """Append the environment's reply. Return whether another turn follows."""
        assert self._environments is not None and self._format is not None
        completion, limits = dialogue.completion, self._environments.config
        if completion.finish_reason != "stop":
            return False
        turn = cut_at_stop(completion.dialogue[-1], dialogue.sampling.stop)
        (reply,) = self._environments.step([turn], [dialogue.episode])
        if reply.error:
            completion.environment_error, completion.finish_reason = reply.error, "environment"
        if reply.message is None:
            return False
        completion.tool_errors += bool(reply.message.error)
        try:
            ids = self._format.encode_reply(reply.message.text, reply.message.role, completion.output_ids_T)
        except RefusedError as error:
            completion.environment_error, completion.finish_reason = str(error), "environment"
            return False
        environment_tokens = len(completion.output_ids_T) - completion.sampled_count
        if completion.num_turns == limits.max_turns:
            completion.finish_reason = "turns"
            return False
        if completion.sampled_count >= dialogue.sampling.max_new_tokens or environment_tokens + len(ids) > limits.max_tokens:
            completion.finish_reason = "length"
            return False
        dialogue.episode = replace(dialogue.episode, turn=completion.num_turns, state=reply.state)
        self._append_tokens(dialogue, self._decode(dialogue, ids), ids)
        return True

    def _append_tokens(
        self, dialogue: _Dialogue, text: str, ids: np.ndarray, logprobs: np.ndarray | None = None, versions: np.ndarray | None = None
    ) -> None:
        """Append tokens of the policy, or of the environment if `logprobs` is None. `versions`: None if the newest version sampled all."""
        lags = None
        if dialogue.staleness:
            version = dialogue.completion.policy_version if versions is None else versions
            lags = np.full(len(ids), dialogue.version - version, np.uint8)
        append_tokens(dialogue.completion, ids, logprobs, lags, text if self._environments is not None else None)

    def _decode(self, dialogue: _Dialogue, ids: np.ndarray) -> str:
        return decode_completion(self._tokenizer, ids.tolist(), self._markers, dialogue.sampling.stop)


def start_environments(config: Config, resources: ExitStack) -> EnvironmentPool | None:
    """Start the environment workers without waiting for them, or return None without environments. `resources` owns the workers."""
    return None if config.environment is None else resources.enter_context(EnvironmentPool(config.environment))


def check_chat_template(config: Config, tokenizer: Any) -> None:
    """Raise UserError if the run has agents that cannot use the tokenizer's chat template."""
    if config.agent is not None:
        ChatFormat(tokenizer, config.data).check(tools=bool(config.agent.tool_parser))


def check_turns(config: Config, tokenizer: Any, problems: Sequence[Problem]) -> None:
    """Try the environment or the agent on the first problems of each set. Raise UserError if it fails, whatever the policy responds."""
    if config.environment is not None:
        check_environment(config.environment, problems, config.data.chat)
    if config.agent is not None:
        from megatron_rl.rollout.agents.trial import check_agent

        check_agent(config.agent, config, tokenizer, problems)


def make_sampler(config: Config, engine: Engine, tokenizer: Any, environments: EnvironmentPool | None, resources: ExitStack) -> Sampler:
    """Return the sampler of a configuration. `resources` owns what it starts."""
    if config.agent is None:
        return MultiTurnSampler(engine, tokenizer, environments, config.data, config.text_markers)
    from megatron_rl.rollout.agents.sampler import AgentSampler  # loads a web server

    return resources.enter_context(AgentSampler(config.agent, engine, tokenizer, config.data))
