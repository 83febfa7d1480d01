"""Tokens of an environment are read by the policy, but not trained on, in the real trainer and in the real loop."""

import random

import pytest
import torch
from support import trainer, training_runs
from support.models import FP8, FP32, random_sequences
from support.transformers_reference import load


def compute_step(folder, samples, kl_coef):
    """Compute PPO's clipped loss with a k3 term by transformers, the mean over sampled tokens. Return the metrics of a step of
    `train_grpo`, and `logprobs`, float32 `[tokens]`, of all sampled tokens."""
    model = load(folder)
    model.get_input_embeddings().padding_idx = None  # transformers gives the padding token, which is the end token too, no gradient
    tokens = []
    for sample in samples:
        sampled = sample.response_mask
        rows = model(sample.ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1].log_softmax(-1)[sampled]
        logprobs = rows.gather(1, sample.response_ids[sampled, None].long())[:, 0]
        ratio, drift = (logprobs - sample.old_logprobs).exp(), sample.reference_logprobs - logprobs
        policy = -torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        tokens.append((policy, drift.exp() - drift - 1, -(rows.exp() * rows).sum(-1), logprobs))
    *columns, logprobs = (torch.cat(column) for column in zip(*tokens, strict=True))
    policy, kl, entropy = (column.mean() for column in columns)
    loss = policy + kl_coef * kl
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    names = "loss/policy", "loss/kl", "entropy", "loss/total", "grad_norm"
    return dict(zip(names, map(float, (policy, kl, entropy, loss, norm)), strict=True)) | {"logprobs": logprobs.detach()}


def dialogues(count, seed):
    """Return random responses with stretches written by an environment."""
    source, sequences = random.Random(seed), random_sequences(count, seed)
    for sequence in sequences:
        known = torch.tensor([source.random() < 0.7 for _ in sequence.response_ids])
        known[source.randrange(len(known))] = True  # a list without one is no answer
        sequence.response_mask = known
        sequence.old_logprobs, sequence.reference_logprobs = sequence.old_logprobs[known], sequence.reference_logprobs[known]
    return sequences


def test_one_step_is_that_of_the_sampled_tokens_alone(worlds, transformers_process, checkpoint):
    """Loss, entropy and gradient match transformers' model up to the order of sums."""
    batch = dialogues(6, seed=5)
    assert 0.5 < sum(sequence.sampled_count for sequence in batch) / sum(len(sequence.response_ids) for sequence in batch) < 0.9
    result = worlds(1).call(trainer.train_grpo, checkpoint, FP32, {}, [batch])[0]
    expected = transformers_process.call(compute_step, checkpoint, batch, 0.1)[0]
    torch.testing.assert_close(result["before"], expected.pop("logprobs"), atol=2e-5, rtol=0)
    assert result["entropy"] == pytest.approx(expected.pop("entropy"), rel=1e-5)
    assert {name: result["steps"][0][name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_log_probs_of_an_environments_tokens_change_nothing(worlds, checkpoint):
    """They change no loss, metric or weight, in steps that read log-probs wherever the loop can."""
    algorithm = {"updates_per_step": 2, "kl_coef": 0.1, "correction": "tis", "calibrate_every": 1}
    arguments = training_runs.run_loop, checkpoint, FP8, algorithm, 2, 0.02, 1
    runs = [worlds(1).call(*arguments, logprob)[0] for logprob in (0.0, -9.0, None)]
    first, second, alone = (training_runs.without_times(run["rows"]) for run in runs)
    assert first == second and runs[0]["advantages"] == runs[1]["advantages"]
    assert first != alone, "the policy reads what the environment says"
    assert (first[1]["length/mean"], first[1]["tokens/generated"]) == (3.5, 56), "lengths count what the policy sampled"
