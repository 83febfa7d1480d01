"""A frozen model computes equal prompts of a row once, with the bits that each sample has alone."""

import pytest
import torch
from support.models import FP8, FP32, random_sequences
from support.trainer import STILL, Trainer

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.mcore.actor import Policy


def score(folder, precision, samples, bound):
    """Return the log-probs of the actor and of a frozen policy with the same model, and the positions that the policy computed."""
    trainer, widths = Trainer(folder, precision, STILL), []
    trainer.actor.micro_batch_tokens = bound
    whole = trainer.actor.compute_logprobs(samples)
    frozen = Policy(trainer.model, 1.0, bound)
    hook = frozen.chunks[0].register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].numel()))
    shared = frozen.compute_logprobs(samples)
    hook.remove()
    return whole, shared, sum(widths)


def make_groups():
    """Return three groups of four samples, of which one has two samples without a response and one has prompts that begin alike."""
    samples = []
    for group, sample in enumerate(random_sequences(3, 5)):
        for member, other in enumerate(random_sequences(4, 10 + group)):
            prompt = torch.cat([sample.prompt_ids, sample.prompt_ids[:member]]) if group == 2 else sample.prompt_ids
            response = other.response_ids[:0] if group == 1 and member > 1 else other.response_ids
            samples.append(TrainingSample(prompt, response, number=len(samples)))
    return samples


@pytest.mark.parametrize("bound", [60, 10000])
@pytest.mark.parametrize("name, precision, shares", [
    ("qwen3", FP8, True), ("qwen3", FP8 | {"kv": "e4m3"}, True), ("llama", FP32, True),
    ("qwen3_moe", FP8, False), ("qwen3_5_text", FP8, False),
])  # fmt: skip
def test_equal_prompts_are_computed_once(worlds, model_folder, name, precision, shares, bound):
    samples = make_groups()
    positions = sum(sample.length - 1 for sample in samples)
    whole, shared, computed = worlds(1).call(score, model_folder(name), precision, samples, bound)[0]
    assert [torch.equal(*pair) for pair in zip(whole[0], shared[0], strict=True)] == [True] * len(samples)
    assert whole[1] == shared[1], "the entropy"
    once = positions - 3 * len(samples[0].prompt_ids) - len(samples[4].prompt_ids)
    assert computed == once if shares and bound > positions else once <= computed <= positions + 16
