"""Ratios as far from 1 as floats go: loss and gradient are finite, and the formula's; ordinary ones keep every bit that they had."""

import math

import pytest
import torch

from megatron_rl.algorithm.importance_weights import assign_corrections
from megatron_rl.algorithm.kl import KL_ESTIMATORS
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import MicroBatch, make_micro_batches
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig

Rows = list[list[float]]


def make_sample(old: list[float], advantage: float, **kwargs: torch.Tensor) -> TrainingSample:
    return TrainingSample([1], [2] * len(old), advantage, old_logprobs=torch.tensor(old), reference_logprobs=torch.tensor(old), **kwargs)


def run(config: AlgorithmConfig, samples: list[TrainingSample], logprobs: Rows) -> tuple[float, Rows]:
    """(loss, gradient by sample) of float32 tensors, as the trainer has them."""
    (batch,) = make_micro_batches(samples, 10_000)
    values = torch.zeros_like(batch.mask)
    values[0, batch.mask[0] == 1] = torch.tensor([value for row in logprobs for value in row])
    values.requires_grad_()
    loss, _ = PolicyLoss(config)(values, batch)
    loss.backward()
    return loss.item(), [part.tolist() for _, part in batch.split_by_sample(values.grad, samples)]


@pytest.mark.parametrize("settings", [{}, {"dual_clip": 3.0}, {"name": "gspo"}, {"name": "gspo", "correction": "tis"}, {"name": "cispo"}])
@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
@pytest.mark.parametrize("shift", [1000.0, -1000.0, 88.8, -88.8, 21.0, -21.0])
@pytest.mark.parametrize("length", [1, 3])
def test_any_ratio_has_a_finite_loss_and_gradient_by_the_formula(settings, advantage, shift, length):
    """In float64, by Python's floats; the exponent is bounded where the docs say so."""
    config = AlgorithmConfig(aggregate="token", **settings)
    loss, (gradient,) = run(config, [make_sample([-1.0] * length, advantage)], [[-1.0 + shift] * length])
    logprob, bounded = -1.0 + shift, math.exp(min(max(shift, -20.0), 20.0))
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.loss == "cispo":
        weight = min(max(math.exp(min(shift, 100.0)), low), high)
        expected, slope = -weight * advantage * logprob, -weight * advantage
    else:
        expected = -min(bounded * advantage, min(max(bounded, low), high) * advantage)
        expected = min(expected, -config.dual_clip * advantage) if config.dual_clip and advantage < 0 else expected
        slope = 0.0
    assert loss == pytest.approx(length * expected, rel=1e-5)
    assert gradient == pytest.approx([slope] * length, rel=1e-5)


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl", "clip_cov", "kl_cov"])
@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
@pytest.mark.parametrize("shift", [1000.0, -1000.0, 88.8, -88.8, 21.0, 1.0, -0.01])
def test_any_ratio_is_finite_for_bounds_on_divergence_and_entropy(loss, advantage, shift):
    """Three tokens, the second chosen for its covariance; the first of probability 1 before."""
    sample = make_sample([0.0, -1.0, -1.0], advantage, high_covariance=torch.tensor([False, True, False]))
    total, (gradient,) = run(AlgorithmConfig(loss=loss), [sample], [[min(shift, 0.0), -1.0 + shift, -1.0 + shift]])
    losses, slopes = [], []
    for old, new, chosen in ((0.0, min(shift, 0.0), False), (-1.0, -1.0 + shift, True), (-1.0, -1.0 + shift, False)):
        moved, ratio = new - old, math.exp(min(max(new - old, -20.0), 20.0))
        if loss in ("dppo_tv", "dppo_kl"):
            p, q = math.exp(min(new, 0.0)), math.exp(old)
            others = 0.0 if q == 1 else (1 - q) * math.log((1 - q) / (1 - p)) if p < 1 else math.inf
            divergence = abs(p - q) if loss == "dppo_tv" else (q * (old - min(new, 0.0)) + others)
            removed = moved * advantage > 0 and divergence > 0.2
            slope = 0.0 if removed else -min(math.exp(min(moved, 90.0)), 20.0) * advantage
            losses.append(slope * new)
        elif loss == "clip_cov":
            bounded = min(max(ratio, 0.8), 1.2)
            value = -min(ratio * advantage, bounded * advantage)
            removed = chosen or abs(moved) > 20 or value != -ratio * advantage
            slope = 0.0 if removed else -ratio * advantage
            losses.append(0.0 if chosen else value)
        else:
            slope = (0.0 if abs(moved) > 20 else -ratio * advantage) + (math.copysign(1.0, moved) if chosen and moved else 0.0)
            losses.append(-ratio * advantage + (abs(moved) if chosen else 0.0))
        slopes.append(slope)
    assert total == pytest.approx(sum(losses), rel=1e-4, abs=1e-6)
    assert gradient == pytest.approx(slopes, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("difference", [1000.0, 88.8, 20.0, 10.0, 3.0, 0.0, -3.0, -20.0, -1000.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_of_any_difference_is_finite(kind, difference):
    """k3 had a gradient of 4.9e8 at 20, and of infinity from 88.8 on."""
    d = torch.tensor(difference, requires_grad=True)
    value = KL_ESTIMATORS[kind](d)
    value.backward()
    bounded = min(difference, 10.0)
    expected = {"k1": -difference, "k2": difference**2 / 2, "k3": math.exp(bounded) - bounded - 1}[kind]
    slope = {"k1": -1.0, "k2": difference, "k3": (difference <= 10) * math.expm1(bounded)}[kind]
    assert (value.item(), d.grad.item()) == (pytest.approx(expected, rel=1e-5, abs=1e-6), pytest.approx(slope, rel=1e-5, abs=1e-6))


@pytest.mark.parametrize("advantage", [1.0, -0.5])
@pytest.mark.parametrize("kind, weights", [("tis", [2.0, 0.5, 1.0, 1.0]), ("icepop", [0.0, 0.5, 1.0, 1.0])])
def test_gspo_gives_each_token_the_gradient_of_its_own_correction(kind, weights, advantage):
    """arXiv 2507.18071, eq. 17: tokens of weight c_t have c_t s A, none outside the clip. One that IcePop masked kept a share of it."""
    config = AlgorithmConfig(name="gspo", aggregate="token", correction=kind, clip_low=0.2, clip_high=0.2)
    old = [-1.0, -2.0, -1.5, -3.0]
    ratios = torch.tensor([8.0, 0.5, 1.0, 1.0])
    sample = make_sample(old, advantage, rollout_logprobs=torch.tensor(old) - ratios.log())
    assign_corrections([sample], config)
    now = [-1.1, -1.9, -1.45, -3.02]
    _, (gradient,) = run(config, [sample], [now])
    s = math.exp(sum(new - before for new, before in zip(now, old, strict=True)) / len(old))
    assert 0.8 < s < 1.2 and gradient == pytest.approx([-weight * s * advantage for weight in weights], rel=1e-5)
    assert kind == "tis" or gradient[0] == 0.0


def compute_losses_before(logprobs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> torch.Tensor:
    """The losses of commit 96b36bf, operator by operator."""
    change = logprobs - batch.old_logprobs
    ratio = torch.exp(batch.average_by_sample(change) if config.loss == "gspo" else change)
    loss = -torch.minimum(ratio * batch.advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages)
    if config.dual_clip is not None:
        loss = torch.where(batch.advantages < 0, torch.minimum(loss, -config.dual_clip * batch.advantages), loss)
    return loss


@pytest.mark.parametrize("settings", [{}, {"name": "dapo"}, {"dual_clip": 3.0}, {"name": "gspo"}, {"correction": "tis"}])
@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_ordinary_ratios_keep_the_bits_of_loss_and_gradient(settings, kl_coef):
    config = AlgorithmConfig(kl_coef=kl_coef, **settings)
    generator = torch.Generator().manual_seed(5)
    samples = []
    for advantage in (1.5, -0.75, 0.0, -2.0, 0.5):
        old, reference, rollout = (-4 * torch.rand(37, generator=generator) for _ in range(3))
        samples.append(TrainingSample([1] * 3, [2] * 37, advantage, rollout, old, reference))
    assign_corrections(samples, config)
    (batch,) = make_micro_batches(samples, 10_000)
    noise = torch.randn(batch.mask.shape, generator=generator) * 0.4
    results = []
    for new in (True, False):
        logprobs = (batch.old_logprobs + noise).masked_fill(batch.mask == 0, 0.0).requires_grad_()
        if new:
            loss, _ = PolicyLoss(config)(logprobs, batch)
        else:
            masked = logprobs.masked_fill(batch.mask == 0, 0.0)
            loss = (compute_losses_before(masked, batch, config) * batch.importance_weights * batch.loss_weights).sum()
            if kl_coef:
                difference = batch.reference_logprobs - masked
                loss = loss + kl_coef * ((torch.exp(difference) - difference - 1) * batch.loss_weights).sum()
        loss.backward()
        results.append((loss.detach(), logprobs.grad))
    for now, then in zip(*results, strict=True):
        assert torch.equal(now.view(torch.int32), then.view(torch.int32))
