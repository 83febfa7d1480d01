"""What is made of rewards beside the group's mean and std, by loops over plain numbers: MaxRL, GDPO, masked answers, distillation."""

import math
import random
import statistics
from pathlib import Path

import pytest
import torch

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.distillation import assign_distilled_advantages
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.multi_objective import normalize_then_sum
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.errors import RunError
from megatron_rl.plugs import ADVANTAGES
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.training.samples import _split_rewards
from megatron_rl.types import Completion, Problem, Reward

MATH, FORMAT = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 1.0, 1.0, 1.0]


def normalize_by_hand(columns: list[tuple[float, list[float]]], counted: list[bool], size: int) -> list[float]:
    total = [0.0] * len(counted)
    for weight, values in columns:
        for start in range(0, len(counted), size):
            members = [i for i in range(start, start + size) if counted[i]]
            group = [values[i] for i in members]
            if len(set(group)) > 1:
                for i in members:
                    total[i] += weight * (values[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
    known = [value for value, counts in zip(total, counted, strict=True) if counts]
    mean, std = statistics.fmean(known), statistics.pstdev(known)
    return [(value - mean) / (std + 1e-6) if counts else 0.0 for value, counts in zip(total, counted, strict=True)]


@pytest.mark.parametrize("excluded", [[False] * 6, [False, True, False, False, False, True]], ids=["all", "some excluded"])
@pytest.mark.parametrize("size", [2, 3])
def test_each_reward_is_normalized_by_itself_then_their_sum_over_the_batch(size, excluded):
    weights = {"math": 1.0, "format": 0.25}
    result = normalize_then_sum({"math": MATH, "format": FORMAT}, weights, excluded, AlgorithmConfig(), size)
    expected = normalize_by_hand([(1.0, MATH), (0.25, FORMAT)], [not value for value in excluded], size)
    assert result == pytest.approx(expected, abs=1e-9)
    equal = {"math": [0.1] * 6, "format": [0.3] * 6}
    assert normalize_then_sum(equal, weights, excluded, AlgorithmConfig(), size) == [0.0] * 6


def test_rewards_are_split_by_function_a_penalty_is_one_and_no_verdict_earns_nothing():
    reward = RewardConfig.model_validate({"functions": [{"name": "math", "weight": 2.0}, {"name": "exact"}]}, strict=False)
    verdicts = [Reward(2.5, True, parts={"math": 1.0, "exact": 0.5}), Reward(0.0, False, error="timed out")]
    completions = [Completion(Problem("0", "", ""), [1], [2], [-1.0], "stop", 0, "", verdict, length_penalty=-0.25) for verdict in verdicts]

    class Sections:
        algorithm = AlgorithmConfig(multi_objective_aggregation="normalize_then_sum", overlong_share=0.5)

    Sections.reward = reward
    rewards, weights = _split_rewards(RolloutBatch(completions), Sections)
    assert rewards == {"math": [1.0, 0.0], "exact": [0.5, 0.0], "overlong": [-0.25, -0.25]}
    assert weights == {"math": 2.0, "exact": 1.0, "overlong": 1.0}


def test_max_rl_has_no_meaning_for_rewards_below_zero():
    with pytest.raises(RunError, match="needs rewards of 0 or more"):
        compute_advantages([1.0, -1.0], [False] * 2, AlgorithmConfig(name="max_rl"), 2)
    compute_advantages([1.0, -1.0], [False, True], AlgorithmConfig(name="max_rl"), 2)  # that one has no verdict


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_a_masked_answer_leaves_the_loss_as_an_excluded_one_does(aggregate):
    def weights(**second: bool) -> list[float]:
        samples = [TrainingSample([1], [2] * 3), TrainingSample([1], [2] * 5, **second), TrainingSample([1], [2])]
        assign_loss_weights(samples, aggregate, 8)
        return [sample.loss_weight for sample in samples]

    assert weights(masked=True) == weights(excluded=True) != weights()
    samples = [TrainingSample([1], [2], masked=True), TrainingSample([1], [], masked=True)]
    assign_loss_weights(samples, aggregate, 8)
    assert [sample.loss_weight for sample in samples] == [0.0, 0.0]


@pytest.mark.parametrize("kind", ADVANTAGES.builtin)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_have_no_sign(kind, size):
    """A mean of 0.1 rounds: -1.4e-11, which counted as negative in the metrics of clip and correction."""
    for value in (0.1, 0.0, 1.0):
        assert compute_advantages([value] * 2 * size, [False] * 2 * size, AlgorithmConfig(advantage=kind), size) == [0.0] * 2 * size


def test_reinforce_pp_whitens_over_tokens_and_batch_std_over_completions():
    """As verl's `compute_reinforce_plus_plus_baseline_outcome_advantage`: +3 and -1/3, whose mean over tokens is 0."""
    case = [1.0, 0.0], [False] * 2
    short, long = compute_advantages(*case, AlgorithmConfig(name="reinforce_pp"), 2, [100, 900])
    tokens = [0.5] * 100 + [-0.5] * 900
    deviation = (statistics.variance(tokens) + 1e-8) ** 0.5
    assert (short, long) == pytest.approx([(value - statistics.fmean(tokens)) / deviation for value in (0.5, -0.5)], rel=1e-12)
    assert (short, long) == (pytest.approx(3.0, abs=0.01), pytest.approx(-1 / 3, abs=0.01))
    assert compute_advantages(*case, AlgorithmConfig(advantage="batch_std"), 2, [100, 900]) == pytest.approx([1.0, -1.0], abs=1e-5)


@pytest.mark.parametrize("std, expected", [("sample", statistics.stdev), ("population", statistics.pstdev)])
def test_grpo_with_either_standard_deviation(std, expected):
    rewards = [1.0, 0.0, 0.25, 0.25]
    by_formula = [(reward - statistics.fmean(rewards)) / (expected(rewards) + 1e-6) for reward in rewards]
    assert compute_advantages(rewards, [False] * 4, AlgorithmConfig(advantage_std=std), 4) == pytest.approx(by_formula, rel=1e-12)


GOLDEN = {
    "group_std": [
        1.6523691207437643, -0.7955851322099605, -0.06119885632384317, -0.7955851322099605,
        -0.8626610693498818, -0.0, 1.4018242376935584, -0.5391631683436762,
    ],
    "group_mean": [0.675, -0.325, -0.025000000000000022, -0.325, -0.6666666666666666, -0.0, 1.0833333333333335, -0.41666666666666663],
    "leave_one_out": [0.9, -0.43333333333333335, -0.03333333333333336, -0.43333333333333335, -1.0, -0.0, 1.6250000000000002, -0.625],
    "batch_std": [
        1.1388278477119338, -0.5483245192687088, -0.0421788091745161, -0.5483245192687088,
        -1.1247682446537617, -0.0, 1.827748397562363, -0.7029801529086009,
    ],
}  # fmt: skip
"""Of commit 96b36bf, every bit."""


@pytest.mark.parametrize("kind", GOLDEN)
def test_ordinary_rewards_keep_every_bit(kind):
    rewards, excluded = [1.0, 0.0, 0.3, 0.0, 0.25, 0.7, 2.0, 0.5], [False] * 5 + [True] + [False] * 2
    config = AlgorithmConfig(advantage=kind, advantage_std="population")
    assert compute_advantages(rewards, excluded, config, 4) == GOLDEN[kind]


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
    config, parts = TeacherConfig(path=Path("t")), []
    both, alone = [draw(1, 5), draw(2, 7)], [draw(1, 5)]
    whole = assign_distilled_advantages(both, config)
    assert assign_distilled_advantages(alone, config, lambda totals: (parts.append(totals), totals)[1])["teacher/kl"] != whole["teacher/kl"]
    assert assign_distilled_advantages([draw(2, 7)], config, lambda totals: Totals.merge([*parts, totals])) == pytest.approx(whole)
    assert torch.equal(alone[0].token_advantages, both[0].token_advantages)


def test_without_a_teacher_nothing_happens():
    sample = draw(1, 3, advantage=2.0)
    assert assign_distilled_advantages([sample], None) == {} and sample.advantages.tolist() == [2.0] * 3
