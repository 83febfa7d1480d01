"""Samples that begin alike compute what they share once, with the bits that each sample has alone and the gradient of all."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.models import FP8, FP32, random_sequences
from support.trainer import STILL, Trainer, own

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.passes.shared_prefixes import can_share


def make_groups():
    """Return three groups of four samples: all alike, two without a response, and prompts of which each begins the next. Some responses are
    equal, or begin alike."""
    samples = []
    for group, sample in enumerate(random_sequences(3, 5, longest=40)):
        for member, other in enumerate(random_sequences(4, 10 + group)):
            prompt = torch.cat([sample.prompt_ids, sample.prompt_ids[:member]]) if group == 2 else sample.prompt_ids
            response = sample.response_ids if group == 0 or member == 0 else torch.cat([sample.response_ids[:2], other.response_ids])
            response = response[:0] if group == 1 and member > 1 else response
            samples.append(TrainingSample(prompt, response, number=len(samples), advantage=1.0))
    return samples


def count_prefixes(samples):
    """Return the number of different prefixes that predict a token."""
    return len({tuple(sample.ids[: end + 1].tolist()) for sample in samples for end in range(sample.length - 1)})


def compare(folder, precision, bound, samples):
    """Compare passes that share prefixes with passes that do not, of the actor and of a frozen policy. Return whether the log-probs and
    entropies are equal, the largest relative difference of a gradient, and the positions that the passes with sharing computed."""
    trainer, widths = Trainer(folder, precision, {**STILL, "micro_batch_tokens": bound}), []
    policies = [trainer.actor, Policy(trainer.model, 1.0, bound)]
    trainer.actor.model.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].numel()))
    shares, shared, whole = [policy._shares_prefixes for policy in policies], [], []
    for sharing, results in ((shares, shared), ([False, False], whole)):
        for policy, flag in zip(policies, sharing, strict=True):
            policy._shares_prefixes = flag
            logprobs, entropy = policy.compute_logprobs(samples)
            results.append([*logprobs, torch.tensor(entropy)])
    computed = widths[: len(widths) // 2]
    gradients, widths[:] = [], []
    for flag in (shares[0], False):
        trainer.actor._shares_prefixes = flag
        trainer.actor.update(own(samples), negative_log_likelihood)
        gradients.append({name: weight.main_grad.clone() for name, weight in trainer.model.named_parameters()})
    difference = max(float((other - gradients[0][name]).norm() / other.norm()) for name, other in gradients[1].items())
    same = [torch.equal(*pair) for results in zip(shared, whole, strict=True) for pair in zip(*results, strict=True)]
    return same == [True] * 2 * (len(samples) + 1), difference, computed, widths[: len(widths) // 2]


@pytest.mark.parametrize("bound", [60, 10000])
@pytest.mark.parametrize("name, precision, shares, noise", [
    ("qwen3", FP8, True, 0.05), ("qwen3", FP8 | {"kv": "e4m3"}, True, 0.05), ("llama", FP32, True, 1e-5),
    ("qwen3_moe", FP8, False, 1e-6), ("qwen3_5_text", FP8, False, 1e-6),
])  # fmt: skip
def test_prefixes_are_computed_once(worlds, model_folder, name, precision, shares, noise, bound):
    samples = make_groups()
    positions, once = sum(sample.length - 1 for sample in samples), count_prefixes(samples)
    same, difference, scored, trained = worlds(1).call(compare, model_folder(name), precision, bound, samples)[0]
    assert same
    assert difference <= noise
    if bound > positions:
        assert [*scored, *trained] == [once] * 3 if shares else min(*scored, *trained) >= positions
    else:
        assert once <= sum(scored) / 2 == sum(trained) < positions if shares else sum(scored) >= 2 * positions


def test_equal_samples_are_one(worlds, model_folder):
    samples = [replace(make_groups()[0], number=number) for number in range(9)]
    same, difference, scored, trained = worlds(1).call(compare, model_folder("llama"), FP32, 10000, samples)[0]
    assert same and difference <= 1e-5
    assert [*scored, *trained] == [samples[0].length - 1] * 3


def test_what_prevents_sharing():
    config = {"context_parallel_size": 1, "pipeline_model_parallel_size": 1, "sequence_parallel": False, "num_moe_experts": None}
    config |= {"attention": (), "trained_mtp_layers": 0}
    assert can_share(SimpleNamespace(**config), torch.device("cpu"))
    assert not can_share(SimpleNamespace(**config), torch.device("meta"))
    for change in ({"context_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"sequence_parallel": True}, {"num_moe_experts": 4}):
        assert not can_share(SimpleNamespace(**config | change), torch.device("cpu"))
    assert not can_share(SimpleNamespace(**config | {"trained_mtp_layers": 1}), torch.device("cpu"))
