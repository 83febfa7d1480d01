"""What is made of rewards beside the group's mean and std: MaxRL and GDPO by loops over plain numbers, and what masked answers leave."""

from __future__ import annotations

import statistics

import pytest

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.multi_objective import normalize_then_sum
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.errors import RunError
from megatron_rl.plugs import ADVANTAGES
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.training.samples import _split_rewards
from megatron_rl.types import Completion, Problem, Reward

MATH, FORMAT = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 1.0, 1.0, 1.0]


def by_hand(columns: list[tuple[float, list[float]]], counted: list[bool], size: int) -> list[float]:
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
    expected = by_hand([(1.0, MATH), (0.25, FORMAT)], [not value for value in excluded], size)
    assert result == pytest.approx(expected, abs=1e-9)


def test_equal_rewards_of_every_function_teach_nothing():
    equal = {"math": [0.1] * 6, "format": [0.3] * 6}
    assert normalize_then_sum(equal, dict.fromkeys(equal, 1.0), [False] * 6, AlgorithmConfig(), 3) == [0.0] * 6


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


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ([0.0] * 4, [0.0] * 4),
        ([1.0] * 4, [0.0] * 4),
        ([0.5, 0.5, 0.0, 0.0], [1.0, 1.0, -1.0, -1.0]),
    ],
)
def test_max_rl_divides_by_the_groups_mean(rewards, expected):
    assert compute_advantages(rewards, [False] * 4, AlgorithmConfig(name="max_rl"), 4) == expected


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


@pytest.mark.parametrize(
    "given, rule",
    [
        ({"accuracy_low": 0.5, "accuracy_high": 0.5, "dynamic_sampling_max_rounds": 2}, "must be less than accuracy_high"),
        ({"accuracy_low": 0.2}, "set dynamic_sampling_max_rounds"),
        ({"advantage": "max_rl", "overlong_share": 0.2}, "needs rewards of 0 or more"),
        ({"name": "rloo", "advantage": "max_rl", "kl_coef": 0.1}, "use kl_in = .loss."),
        ({"name": "rloo", "multi_objective_aggregation": "normalize_then_sum", "kl_coef": 0.1}, "use kl_in = .loss."),
    ],
)
def test_options_that_do_not_fit_are_refused(given, rule):
    with pytest.raises(ValueError, match=rule):
        AlgorithmConfig.model_validate(given)


@pytest.mark.parametrize("kind", ADVANTAGES.builtin)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_have_no_sign(kind, size):
    """A mean of 0.1 rounds: -1.4e-11, which counted as negative in the metrics of clip and correction."""
    assert compute_advantages([0.1] * 2 * size, [False] * 2 * size, AlgorithmConfig(advantage=kind), size) == [0.0] * 2 * size


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
        1.6523691207437643,
        -0.7955851322099605,
        -0.06119885632384317,
        -0.7955851322099605,
        -0.8626610693498818,
        -0.0,
        1.4018242376935584,
        -0.5391631683436762,
    ],
    "group_mean": [0.675, -0.325, -0.025000000000000022, -0.325, -0.6666666666666666, -0.0, 1.0833333333333335, -0.41666666666666663],
    "leave_one_out": [0.9, -0.43333333333333335, -0.03333333333333336, -0.43333333333333335, -1.0, -0.0, 1.6250000000000002, -0.625],
    "batch_std": [
        1.1388278477119338,
        -0.5483245192687088,
        -0.0421788091745161,
        -0.5483245192687088,
        -1.1247682446537617,
        -0.0,
        1.827748397562363,
        -0.7029801529086009,
    ],
}
"""Of commit 96b36bf, every bit."""


@pytest.mark.parametrize("kind", GOLDEN)
def test_ordinary_rewards_keep_every_bit(kind):
    rewards, excluded = [1.0, 0.0, 0.3, 0.0, 0.25, 0.7, 2.0, 0.5], [False] * 5 + [True] + [False] * 2
    config = AlgorithmConfig(advantage=kind, advantage_std="population")
    assert compute_advantages(rewards, excluded, config, 4) == GOLDEN[kind]
