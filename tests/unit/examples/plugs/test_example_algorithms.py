"""The examples of a loss and of an advantage by their formulas, through the interfaces of the loop."""

from __future__ import annotations

import math

import pytest
import torch
from support.micro_batches import iter_target_positions

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig

SAPO = "examples.plugs.sapo:token_losses"


@pytest.mark.parametrize("taus", [{}, {"tau_positive": 2.0, "tau_negative": 0.5}])
def test_sapo_is_its_formula(taus):
    old, new = torch.tensor([-1.0, -2.0]), (-0.25, -3.0)
    samples = [TrainingSample([1], [2, 3], advantage, old_logprobs=old) for advantage in (1.5, -0.5)]
    config = AlgorithmConfig(loss=SAPO, loss_settings=taus)
    (batch,) = make_micro_batches(samples, 8)
    logprobs = torch.zeros_like(batch.mask)
    for _, positions in iter_target_positions(batch, samples):
        logprobs[0, positions] = torch.tensor(new)
    loss, sums = PolicyLoss(config)(logprobs.requires_grad_(), batch)
    by_hand = 0.0
    for sample in samples:
        tau = taus.get("tau_positive", 1.0) if sample.advantage > 0 else taus.get("tau_negative", 1.05)
        for value, before in zip(new, old.tolist(), strict=True):
            by_hand -= 4 / tau / (1 + math.exp(-tau * (math.exp(value - before) - 1))) * sample.advantage
    assert loss.item() == pytest.approx(by_hand, rel=1e-6)
    assert sums["clip/positive"] == sums["clip/negative"] == 0
    loss.backward()
    assert logprobs.grad[batch.mask == 1].all() and not logprobs.grad[batch.mask == 0].any()


def test_group_median_leaves_out_who_is_excluded():
    rewards = (1.0, 0.0, 0.25, 99.0, 1.0, 3.0, 2.0, 9.0)
    config = AlgorithmConfig(advantage="examples.plugs.group_median:group_median")
    assert compute_advantages(rewards, [reward > 50 for reward in rewards], config, 4) == [0.75, -0.25, 0.0, 0.0, -1.5, 0.5, -0.5, 6.5]
