"""Tokens of an environment are read by the policy, but not trained on, in the real trainer and in the real loop."""

import random

import pytest
import torch
from support import trainer, training_runs, transformers_reference
from support.models import FP8, FP32, random_sequences


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
    """Loss, entropy and gradient match transformers' model, token by token, up to the order of sums."""
    batch = dialogues(6, seed=5)
    assert 0.5 < sum(sequence.sampled_count for sequence in batch) / sum(len(sequence.response_ids) for sequence in batch) < 0.9
    result = worlds(1).call(trainer.train_grpo, checkpoint, FP32, {}, [batch])[0]
    expected = transformers_process.call(transformers_reference.grpo, checkpoint, [vars(sequence) for sequence in batch], 0.1)[0]
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
