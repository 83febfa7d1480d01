"""On-policy distillation: each token's advantage, or term of the loss, against its formula in Python floats, alone and beside rewards, and
what is measured."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithm.distillation import assign_distilled_advantages
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.teacher import TeacherConfig


def draw(seed: int, count: int, **fields: object) -> TrainingSample:
    source = random.Random(seed)
    old, teacher = (torch.tensor([-source.expovariate(1.0) for _ in range(count)], dtype=torch.float32) for _ in range(2))
    return TrainingSample([1, 2], [3] * count, old_logprobs=old, teacher_logprobs=teacher, **fields)


@pytest.mark.parametrize("kl_coef, reward_coef", [(1.0, 1.0), (0.25, 0.0), (2.0, 0.5)])
def test_a_tokens_advantage_is_its_formula(kl_coef, reward_coef):
    config = TeacherConfig(path=Path("t"), kl_coef=kl_coef, reward_coef=reward_coef)
    of_tokens = torch.tensor([0.5, -2.0, 1.0])
    samples = [draw(1, 4, advantage=1.5), draw(2, 1, advantage=-0.5), draw(3, 3, token_advantages=of_tokens), draw(4, 0)]
    before = [sample.advantages.tolist() for sample in samples]
    metrics = assign_distilled_advantages(samples, config)
    gaps = []
    for sample, advantages in zip(samples, before, strict=True):
        pairs = list(zip(sample.old_logprobs.tolist(), sample.teacher_logprobs.tolist(), strict=True))
        expected = [reward_coef * a + kl_coef * (q - p) for a, (p, q) in zip(advantages, pairs, strict=True)]
        assert sample.token_advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert sample.advantage == pytest.approx(math.fsum(expected) / max(len(expected), 1), abs=1e-6)
        gaps += [p - q for p, q in pairs]
    assert metrics == {"teacher/kl": pytest.approx(math.fsum(gaps) / len(gaps)), "teacher/kl_max": pytest.approx(max(gaps))}


def compute_loss(config: TeacherConfig, move: float) -> tuple[float, list[float], dict[str, float]]:
    """(Loss, gradient of the answer tokens' log-probs, metrics), once the policy has moved by so much from what sampled."""
    samples = [draw(1, 4, advantage=1.5), draw(2, 1, advantage=-0.5)]
    assign_distilled_advantages(samples, config)
    (batch,) = make_micro_batches(samples, 64)
    logprobs = (batch.old_logprobs + move).requires_grad_()
    loss, sums = PolicyLoss(AlgorithmConfig(), config)(logprobs, batch)
    loss.backward()
    return loss.item(), logprobs.grad[batch.mask == 1].tolist(), {name: float(value) for name, value in sums.items()}


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_k2_in_the_loss_has_the_advantages_gradient_until_the_first_update(reward_coef):
    """Both are the reverse KL's: its gradient is (log p - log p_teacher) times that of log p. After an update only the loss sees the
    present policy."""
    shared = {"path": Path("t"), "kl_coef": 0.25, "reward_coef": reward_coef}
    in_advantage, in_loss = TeacherConfig(**shared), TeacherConfig(**shared, kl_in="loss")
    gradients = [compute_loss(config, 0.0)[1] for config in (in_advantage, in_loss)]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-6) and all(gradients[0])
    moved = [compute_loss(config, 0.1)[1] for config in (in_advantage, in_loss)]
    assert max(abs(a - b) for a, b in zip(*moved, strict=True)) > 0.02


@pytest.mark.parametrize("estimator, formula", [("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(d) - d - 1)])
def test_the_term_of_the_loss_is_its_formula(estimator, formula):
    config = TeacherConfig(path=Path("t"), kl_coef=2.0, reward_coef=0.5, kl_in="loss", kl_estimator=estimator)
    loss, _, sums = compute_loss(config, 0.1)
    alone, _, without = compute_loss(TeacherConfig(path=Path("t"), kl_coef=1e-30, reward_coef=0.5, kl_in="loss"), 0.1)
    gaps = [gap for sample in (draw(1, 4), draw(2, 1)) for gap in (sample.teacher_logprobs - sample.old_logprobs - 0.1).tolist()]
    assert sums["loss/teacher_kl"] == pytest.approx(math.fsum(map(formula, gaps)), rel=1e-5)
    assert loss == pytest.approx(alone + 2.0 * sums["loss/teacher_kl"], rel=1e-5) and sums["loss/policy"] == without["loss/policy"]


def test_an_estimator_without_a_loss_is_refused():
    with pytest.raises(ValueError, match="kl_estimator only applies to kl_in = .loss."):
        TeacherConfig(path=Path("t"), kl_estimator="k3")


def test_tokens_of_an_environment_have_none():
    sample = draw(5, 2)
    sample.response_ids, sample.response_mask = torch.tensor([3, 9, 3]), torch.tensor([True, False, True])
    assign_distilled_advantages([sample], TeacherConfig(path=Path("t")))
    assert len(sample.advantages) == sample.sampled_count == 2


def test_metrics_are_of_all_replicas_and_bits_of_a_sample_its_own():
    """Replicas' totals are joined; the same sample alone gets the same bits."""
    config, parts = TeacherConfig(path=Path("t")), []
    both, alone = [draw(1, 5), draw(2, 7)], [draw(1, 5)]
    whole = assign_distilled_advantages(both, config)
    assert assign_distilled_advantages(alone, config, lambda totals: (parts.append(totals), totals)[1])["teacher/kl"] != whole["teacher/kl"]
    assert assign_distilled_advantages([draw(2, 7)], config, lambda totals: Totals.merge([*parts, totals])) == pytest.approx(whole)
    assert torch.equal(alone[0].token_advantages, both[0].token_advantages)


def test_without_a_teacher_nothing_happens():
    sample = draw(1, 3, advantage=2.0)
    assert assign_distilled_advantages([sample], None) == {} and sample.advantages.tolist() == [2.0] * 3
