"""Answers of one turn or of many: the engine samples, the environment replies, the engine goes on from exactly those tokens.

Token in, token out: a turn's prompt is the ids of everything before it, as they were sampled. Of an environment's message only the
message is tokenised, by itself; what was sampled is never tokenised again, so the trainer scores the very tokens that the engine drew.

All answers that go on take their next turn in one call of the engine: an answer waits for the slowest of the turn before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.observability import hang_watchdog
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.environment_pool import EnvironmentPool
from megatron_rl.rollout.environments.base import Episode, StepResult
from megatron_rl.types import Completion, Problem, SamplingParams


@dataclass
class _Dialogue:
    """An answer that grows."""

    completion: Completion
    episode: Episode
    sampling: SamplingParams


class MultiTurnSampler:
    """Samples answers. `environments` is None where every answer is one turn."""

    def __init__(self, engine: Engine, tokenizer: Any, environments: EnvironmentPool | None = None) -> None:
        self._engine, self._tokenizer, self._environments = engine, tokenizer, environments

    def sample(
        self, problems_B: Sequence[Problem], sampling: SamplingParams | Sequence[SamplingParams], version: int, staleness: int = 0
    ) -> list[Completion]:
        """One completion for each problem, in order, not yet scored; `max_new_tokens` of `sampling`, one for all or one for each, bounds
        all turns of a completion together.

        Raises RunError where any token was sampled by another policy version than `version` or the `staleness` before it.
        """
        samplings = [sampling] * len(problems_B) if isinstance(sampling, SamplingParams) else sampling
        if self._environments is not None:
            samplings = [replace(one, stop=self._environments.stop) for one in samplings]
        dialogues = [self._start_dialogue(problem, one, version) for problem, one in zip(problems_B, samplings, strict=True)]
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
        """The next turn of all."""
        answers = [dialogue.completion for dialogue in running]
        hang_watchdog.enter_phase("generate")
        left = [replace(one.sampling, max_new_tokens=one.sampling.max_new_tokens - one.completion.sampled_count) for one in running]
        found = self._engine.generate([answer.prompt_ids_T + answer.output_ids_T for answer in answers], left)
        for dialogue, generation in zip(running, found, strict=True):
            wrong = {generation.policy_version, *generation.versions_T} - set(allowed)
            if wrong:
                held = f"the trainer holds version {allowed[-1]}" + (f" and takes {allowed[0]} and newer" if len(allowed) > 1 else "")
                raise RunError(f"a completion was sampled by policy version {min(wrong)}, {held}")
            completion = dialogue.completion
            self._append_tokens(completion, generation.output_ids_T, generation.logprobs_T, True)
            completion.routed_experts_T = extend_routing_record(completion.routed_experts_T, generation.routed_experts_T)
            completion.versions_T += generation.versions_T or [generation.policy_version] * len(generation.output_ids_T)
            completion.finish_reason, completion.policy_version = generation.finish_reason, generation.policy_version

    def _step_environments(self, running: list[_Dialogue]) -> list[_Dialogue]:
        """Adds what the environments reply; returns the dialogues that go on."""
        assert self._environments is not None
        stopped = [dialogue for dialogue in running if dialogue.completion.finish_reason == "stop"]
        texts = [dialogue.completion.dialogue[-1] for dialogue in stopped]
        replies = self._environments.step(texts, [dialogue.episode for dialogue in stopped])
        return [dialogue for dialogue, reply in zip(stopped, replies, strict=True) if self._apply_reply(dialogue, reply)]

    def _apply_reply(self, dialogue: _Dialogue, reply: StepResult) -> bool:
        """Whether there is another turn. A message that none could follow is left out."""
        assert self._environments is not None
        completion, limits = dialogue.completion, self._environments.config
        if reply.error:
            completion.environment_error, completion.finish_reason = reply.error, "environment"
        if reply.message is None:
            return False
        completion.tool_errors += bool(reply.message.error)
        ids = self._tokenizer.encode(reply.message.text, add_special_tokens=False)
        said = len(completion.output_ids_T) - completion.sampled_count
        if completion.num_turns == limits.max_turns:
            completion.finish_reason = "turns"
            return False
        if completion.sampled_count >= dialogue.sampling.max_new_tokens or said + len(ids) > limits.max_tokens:
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
