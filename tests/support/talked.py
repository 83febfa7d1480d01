"""Answers of several turns from the served engine, on top of `support.served`, in the same one rank of a `World`."""

from __future__ import annotations

import string
from typing import Any

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.data.byte_tokenizer import load_tokenizer
from megatron_rl.rollout.environment_pool import EnvironmentPool
from megatron_rl.rollout.environments.base import Message
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.types import Problem, SamplingParams
from support.served import _now


class Counter:
    """Counts the turns aloud. A random model soon writes one of so many letters."""

    stop = tuple(string.ascii_lowercase)

    def __init__(self, problem: Problem) -> None:
        self.turns = 0

    def step(self, text: str) -> Message | None:
        self.turns += 1
        return Message(f"={self.turns}=") if text.endswith(self.stop) else None


def converse(prompts: list[str], version: int, tokens: int, turns: int) -> dict[str, Any]:
    """Samples answers: their texts, and log-probs of what the policy sampled, one answer after the other, by the engine (`engine`), by
    the trainer given answers with the environment's tokens marked (`trainer`), and out of those of whole answers (`whole`)."""
    here = _now[0]
    config = EnvironmentConfig(name="support.talked:Counter", max_turns=turns, workers=1)
    with EnvironmentPool(config) as environments:
        talk = MultiTurnSampler(here.engine, load_tokenizer(here.trainer.folder), environments)
        answers = talk.sample([Problem(text, text, "") for text in prompts], SamplingParams(1.0, tokens), version)
    whole = here.trainer.actor.compute_logprobs([TrainingSample(answer.prompt_ids_T, answer.output_ids_T) for answer in answers])[0]
    marked = [TrainingSample(answer.prompt_ids_T, answer.output_ids_T, response_mask=answer.response_mask_T) for answer in answers]
    masks = [torch.tensor(answer.response_mask_T) for answer in answers]
    told = [torch.tensor(answer.logprobs_T) for answer in answers]
    return {
        "parts": [answer.dialogue for answer in answers],
        "ids": [answer.output_ids_T for answer in answers],
        "finish": [answer.finish_reason for answer in answers],
        "sampled": [answer.sampled_count for answer in answers],
        "engine": torch.cat([values[mask] for values, mask in zip(told, masks, strict=True)]),
        "trainer": torch.cat(here.trainer.actor.compute_logprobs(marked)[0]),
        "whole": torch.cat([values[mask] for values, mask in zip(whole, masks, strict=True)]),
    }
