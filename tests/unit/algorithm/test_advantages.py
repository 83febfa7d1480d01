"""What is made of rewards beside the group's mean and std, by loops over plain numbers: MaxRL, GDPO, masked answers, distillation."""

import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantages import compute_advantages
from megatron_rl.algorithm.distillation import assign_distilled_advantages
from megatron_rl.algorithm.multi_objective import normalize_then_sum
from megatron_rl.batch.totals import Totals
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.teacher import TeacherConfig
from megatron_rl.errors import RunError
from megatron_rl.plugs import ADVANTAGES
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.training.samples import _split_rewards, prepare_samples
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


def _prepare_group(rewards: list[float], penalties: list[float], **algorithm: object) -> list[float]:
    """Return the advantages of a group as the trainer gets them."""
    sections = {"model": {"path": "m"}, "rollout": {"group_size": len(rewards), "prompts_per_step": 1}, "algorithm": algorithm}
    functions = {"functions": [{"name": "math"}, {"name": "exact", "weight": 0.0}]}
    config = Config.model_validate({**sections, "reward": functions}, strict=False)
    empty = np.empty(0, np.int32)
    members = [
        Completion(Problem("0", "", ""), empty, np.array([1], np.int32), np.array([-1.0]), "stop", 0, "", length_penalty=penalty)
        for penalty in penalties
    ]
    for member, reward in zip(members, rewards, strict=True):
        failed = Reward(0.0, False, error="timed out", excluded=True)
        member.reward = failed if math.isnan(reward) else Reward(reward, reward > 0, parts={"math": reward, "exact": 0.0})
    (batch,) = prepare_samples(RolloutBatch(members, {"ahead/generate": 1.0}), 1, config, None, None).mini_batches
    return [sample.advantage for sample in batch]


@pytest.mark.parametrize("settings", [{"advantage": kind} for kind in (*ADVANTAGES.builtin, "gdpo") if kind != "max_rl"])
def test_a_penalty_alone_is_not_divided_by_its_own_deviation(settings):
    """One answer with 0.025 of penalty among seven without had the advantage -2.47, like a wrong answer among seven right ones."""
    if settings["advantage"] == "gdpo":
        settings = {"multi_objective_aggregation": "normalize_then_sum"}
    settings = {"name": "dapo", "overlong_share": 0.2, **settings}
    penalties = [-0.025, *[0.0] * 7]
    for reward in (0.0, 1.0):
        expected = [penalty - statistics.fmean(penalties) for penalty in penalties]
        assert _prepare_group([reward] * 8, penalties, **settings) == pytest.approx(expected, abs=1e-12)
    assert _prepare_group([1.0] * 8, [-0.025] * 8, **settings) == [0.0] * 8
    wrong_and_long = _prepare_group([0.0, *[1.0] * 7], penalties, **settings)
    assert wrong_and_long[0] < -0.8, "beside rewards that differ, penalties count as in DAPO"


def test_a_penalty_alone_in_numbers():
    by_hand = (-0.025 * 7 / 8) / (statistics.stdev([-0.025, *[0.0] * 7]) + 1e-6)
    assert by_hand == pytest.approx(-2.47, abs=0.01)
    group = [1.0] * 7, [-0.025, *[0.0] * 6]
    excluded = _prepare_group([*group[0], math.nan], [*group[1], -0.5], name="dapo")
    assert excluded == pytest.approx([-0.025 * 6 / 7, *[0.025 / 7] * 6, 0.0], abs=1e-12), "who has no verdict does not count"


def test_max_rl_has_no_meaning_for_rewards_below_zero():
    with pytest.raises(RunError, match="needs rewards of 0 or more"):
        compute_advantages([1.0, -1.0], [False] * 2, AlgorithmConfig(name="max_rl"), 2)
    compute_advantages([1.0, -1.0], [False, True], AlgorithmConfig(name="max_rl"), 2)  # that one has no verdict


@pytest.mark.parametrize("kind", ADVANTAGES.builtin)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_have_no_sign(kind, size):
    """A mean of 0.1 rounds: -1.4e-11, which counted as negative in the metrics of clip and correction."""
    for value in (0.1, 0.0, 1.0):
        for rewards in ([value] * 2 * size, [value, value + 1e-9] * size):
            assert compute_advantages(rewards, [False] * 2 * size, AlgorithmConfig(advantage=kind), size) == [0.0] * 2 * size


def test_reinforce_pp_whitens_over_tokens_and_batch_std_over_completions():
    """As verl's `compute_reinforce_plus_plus_baseline_outcome_advantage`: +3 and -1/3, whose mean over tokens is 0."""
    case = [1.0, 0.0], [False] * 2
    short, long = compute_advantages(*case, AlgorithmConfig(name="reinforce_pp"), 2, [100, 900])
    tokens = [0.5] * 100 + [-0.5] * 900
    deviation = (statistics.variance(tokens) + 1e-8) ** 0.5
    assert (short, long) == pytest.approx([(value - statistics.fmean(tokens)) / deviation for value in (0.5, -0.5)], rel=1e-12)
    assert (short, long) == (pytest.approx(3.0, abs=0.01), pytest.approx(-1 / 3, abs=0.01))
    assert compute_advantages(*case, AlgorithmConfig(advantage="batch_std"), 2, [100, 900]) == pytest.approx([1.0, -1.0], abs=1e-5)


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
    config = AlgorithmConfig(advantage=kind, **{"advantage_std": "population"} if kind == "group_std" else {})
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
