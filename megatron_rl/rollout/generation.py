"""Sample completions of one turn or many: the engine samples, the environment replies, the engine continues from exactly those tokens.

Token in, token out: a turn's prompt is the ids of everything before it, as sampled. Only the environment's message is tokenized, by
itself; sampled text is never tokenized again, so the trainer scores the very tokens that the engine drew.

All unfinished completions take their next turn in one call of the engine, so each waits for the slowest of the previous turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.batch.kept_tokens import extend_kept_tokens
from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.observability import hang_watchdog
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.environment_pool import EnvironmentPool
from megatron_rl.rollout.environments.base import Episode, StepResult
from megatron_rl.types import Completion, Problem, SamplingParams


@dataclass
class _Dialogue:
    """A completion in progress."""

    completion: Completion
    episode: Episode
    sampling: SamplingParams


class MultiTurnSampler:
    """Samples completions. `environments` is None if every completion is one turn."""

    def __init__(self, engine: Engine, tokenizer: Any, environments: EnvironmentPool | None = None) -> None:
        self._engine, self._tokenizer, self._environments = engine, tokenizer, environments

    def sample(
        self, problems_B: Sequence[Problem], samplings_B: Sequence[SamplingParams], version: int, staleness: int = 0
    ) -> list[Completion]:
        """Return one completion per problem, in order, not yet scored. `max_new_tokens` bounds all turns of a completion together.

        Raise RunError if a token was sampled by another policy version than `version` or the `staleness` versions before it.
        """
        if self._environments is not None:
            samplings_B = [replace(params, stop=params.stop + self._environments.stop) for params in samplings_B]
        dialogues = [self._start_dialogue(problem, params, version) for problem, params in zip(problems_B, samplings_B, strict=True)]
        running = dialogues
        while running:
            self._sample_turn(running, range(version - staleness, version + 1))
            running = self._step_environments(running) if self._environments is not None else []
        for dialogue in dialogues:
            dialogue.completion.text = self._decode(dialogue.completion.output_ids_T)
        return [dialogue.completion for dialogue in dialogues]

    def _start_dialogue(self, problem: Problem, sampling: SamplingParams, version: int) -> _Dialogue:
        prompt = self._tokenizer.encode(problem.prompt, add_special_tokens=False)
        return _Dialogue(Completion(problem, prompt, [], [], "", version, ""), Episode(**vars(problem)), sampling)

    def _sample_turn(self, running: list[_Dialogue], allowed: range) -> None:
        """Sample the next turn of every dialogue."""
        hang_watchdog.enter_phase("generate")
        prompts = [dialogue.completion.prompt_ids_T + dialogue.completion.output_ids_T for dialogue in running]
        samplings = [
            replace(dialogue.sampling, max_new_tokens=dialogue.sampling.max_new_tokens - dialogue.completion.sampled_count)
            for dialogue in running
        ]
        for dialogue, generation in zip(running, self._engine.generate(prompts, samplings), strict=True):
            unexpected = {generation.policy_version, *generation.versions_T} - set(allowed)
            if unexpected:
                expected = f"the trainer holds version {allowed[-1]}" + (f" and takes {allowed[0]} and newer" if len(allowed) > 1 else "")
                raise RunError(f"a completion was sampled by policy version {min(unexpected)}, {expected}")
            completion = dialogue.completion
            self._append_tokens(completion, generation.output_ids_T, generation.logprobs_T, True)
            completion.routed_experts_T = extend_routing_record(completion.routed_experts_T, generation.routed_experts_T)
            completion.kept_tokens = extend_kept_tokens(completion.kept_tokens, generation.kept_tokens)
            completion.versions_T += generation.versions_T or [generation.policy_version] * len(generation.output_ids_T)
            completion.finish_reason, completion.policy_version = generation.finish_reason, generation.policy_version

    def _step_environments(self, running: list[_Dialogue]) -> list[_Dialogue]:
        """Append the environments' replies and return the dialogues that continue."""
        assert self._environments is not None
        stopped = [dialogue for dialogue in running if dialogue.completion.finish_reason == "stop"]
        texts = [dialogue.completion.dialogue[-1] for dialogue in stopped]
        replies = self._environments.step(texts, [dialogue.episode for dialogue in stopped])
        return [dialogue for dialogue, reply in zip(stopped, replies, strict=True) if self._apply_reply(dialogue, reply)]

    def _apply_reply(self, dialogue: _Dialogue, reply: StepResult) -> bool:
        """Append the reply and return True, or return False if no turn can follow it."""
        assert self._environments is not None
        completion, limits = dialogue.completion, self._environments.config
        if reply.error:
            completion.environment_error, completion.finish_reason = reply.error, "environment"
        if reply.message is None:
            return False
        completion.tool_errors += bool(reply.message.error)
        ids = self._tokenizer.encode(reply.message.text, add_special_tokens=False)
        environment_tokens = len(completion.output_ids_T) - completion.sampled_count
        if completion.num_turns == limits.max_turns:
            completion.finish_reason = "turns"
            return False
        if completion.sampled_count >= dialogue.sampling.max_new_tokens or environment_tokens + len(ids) > limits.max_tokens:
            completion.finish_reason = "length"
            return False
        dialogue.episode = replace(dialogue.episode, state=reply.state)
        self._append_tokens(completion, ids, [0.0] * len(ids), False)
        completion.versions_T += [completion.policy_version] * len(ids)
        return True

    def _append_tokens(self, completion: Completion, ids: list[int], logprobs: list[float], sampled: bool) -> None:
        completion.output_ids_T += ids
        completion.logprobs_T += logprobs
        if self._environments is not None:
            completion.response_mask_T += [sampled] * len(ids)
            completion.dialogue.append(self._decode(ids))

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
