"""Checks of live engines: agents against the direct path, who may ask, and the record of routing. See `support.trainer_engine`."""

import numpy as np
import torch

from examples.arithmetic.tool_agent import CHAT_TEMPLATE
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.types import Problem, SamplingParams
from support.agents import config
from support.trainer_engine import current


class Recorder:
    """Engines that record requests and answers."""

    def __init__(self, engines):
        self.engines, self.asked = engines, []

    def generate(self, prompts, samplings, abort=None):
        generations = self.engines.generate(prompts, samplings, abort)
        self.asked += zip(prompts, samplings, generations, strict=True)
        return generations


def same(one, other):
    """Return whether two generations have the same bits: ids, log-probs, versions and experts."""
    names = ("output_ids_T", "logprobs_T", "versions_T", "routed_experts_T")
    arrays = [(getattr(one, name), getattr(other, name)) for name in names]
    return one.policy_version == other.policy_version and all(
        (mine is None) == (its is None) and (mine is None or np.array_equal(mine, its)) for mine, its in arrays
    )


def sample_by_agents(count, tokens, version):
    """Let `count` agents send three requests each, in conversations that branch after the first answer."""
    recorder, tokenizer = Recorder(current().engines), load_tokenizer(current().trainer.folder)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    problems = [Problem(str(number), "branch", "") for number in range(count)]
    samplings = [SamplingParams(1.0, tokens, seed=number) for number in range(count)]
    with AgentSampler(config(), recorder, tokenizer) as sampler:
        completions = sampler.sample(problems, samplings, version)
    prompts, asked, answers = zip(*recorder.asked, strict=True)
    direct = current().engines.generate(prompts, asked)
    conversations = [each for completion in completions for each in completion.conversations]
    samples = [TrainingSample(each.prompt_ids_T, each.output_ids_T, response_mask=each.response_mask_T) for each in conversations]
    return {
        "errors": [completion.environment_error for completion in completions],
        "conversations": len(conversations),
        "sampled": sum(each.sampled_count for each in conversations) - sum(len(answer.output_ids_T) for answer in answers),
        "same": [same(*pair) for pair in zip(answers, direct, strict=True)],
        "held": [any(holds(each, *request) for each in conversations) for request in recorder.asked],
        "routed": [each.routed_experts_T for each in conversations],
        "direct routed": [find_last(each, prompts, direct).routed_experts_T for each in conversations],
        "versions": {each.policy_version for each in conversations},
        "engine": torch.cat([torch.tensor(each.logprobs_T[each.response_mask_T]) for each in conversations]),
        "trainer": current().compute_logprobs(samples),
    }


def holds(conversation, prompt, _, answer):
    """Return whether a conversation trains on an answer, after exactly the tokens of its prompt, with its log-probs."""
    start = len(prompt) - len(conversation.prompt_ids_T)
    place = slice(start, start + len(answer.output_ids_T))
    return (
        np.array_equal(
            np.concatenate([conversation.prompt_ids_T, conversation.output_ids_T[: place.stop]]), [*prompt, *answer.output_ids_T]
        )
        and conversation.response_mask_T[place].all()
        and np.array_equal(conversation.logprobs_T[place], answer.logprobs_T)
    )


def find_last(conversation, prompts, answers):
    """Return the answer that a conversation ends with."""
    whole = [*conversation.prompt_ids_T, *conversation.output_ids_T]
    return next(answer for prompt, answer in zip(prompts, answers, strict=True) if [*prompt, *answer.output_ids_T] == whole)
