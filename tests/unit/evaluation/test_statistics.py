"""Estimators of an evaluation against slow, independent computations: all sub-samples, all signs, and coverage by simulation."""

import random
from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.evaluation.statistics import estimate_difference, estimate_mean, majority_at_k, pass_at_k, powers_of_two, sign_flip_p_value

Completion = tuple[str | None, bool]
completions = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8)


def pass_by_enumeration(correct: int, samples: int, k: int) -> Fraction:
    drawn = list(combinations([True] * correct + [False] * (samples - correct), k))
    return Fraction(sum(map(any, drawn)), len(drawn))


def majority_by_enumeration(sample: list[Completion], k: int) -> Fraction:
    """Every sub-sample votes; every winner among ties, and every completion that gave the winning answer, stands for it alike often."""
    total, drawn = Fraction(0), list(combinations(sample, k))
    for part in drawn:
        votes = Counter(answer for answer, _ in part if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        for winner in winners:
            verdicts = [correct for answer, correct in part if answer == winner]
            total += Fraction(sum(verdicts), len(verdicts) * len(winners))
    return total / len(drawn)


def votes_of(sample: list[Completion]) -> list[tuple[int, int]]:
    answers = {answer for answer, _ in sample if answer is not None}
    return [(len(of), sum(of)) for of in ([correct for given, correct in sample if given == answer] for answer in sorted(answers))]


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_sub_samples_with_a_correct_one(case):
    assert pass_at_k(*case) == pytest.approx(float(pass_by_enumeration(*case)), abs=1e-12)


@given(completions)
def test_majority_at_k_is_that_of_all_sub_samples(sample):
    ks = range(1, len(sample) + 1)
    expected = [float(majority_by_enumeration(sample, k)) for k in ks]
    assert majority_at_k(votes_of(sample), len(sample), list(ks)) == pytest.approx(expected, abs=1e-12)


def test_majority_of_many_and_the_ks_of_a_table():
    at_1, at_512, at_1024 = majority_at_k([(64, 64), (60, 0)], 1024, [1, 512, 1024])  # binomials as large as float64 allows
    assert at_1 == pytest.approx(64 / 1024) and at_1 < at_512 < 1.0 and at_1024 == pytest.approx(1.0)
    assert majority_at_k([(48, 48), (8, 0)], 64, [32]) == [1.0]  # not above, by rounding
    assert [powers_of_two(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@given(st.lists(st.integers(-3, 3), max_size=9))
def test_the_p_value_counts_all_choices_of_signs(differences):
    choices = product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * size for sign, size in zip(signs, differences, strict=True))) for signs in choices]
    assert sign_flip_p_value(differences) == pytest.approx(sum(value >= abs(sum(differences)) for value in sums) / len(sums))


def test_one_completion_each_is_mcnemars_exact_test_and_has_wilsons_interval():
    assert sign_flip_p_value([1] * 9 + [-1] * 2 + [0] * 50) == pytest.approx(2 * sum(comb(11, few) for few in range(3)) / 2**11)
    result = estimate_mean([1.0] * 8 + [0.0] * 2, 1)
    assert (result.low, result.high) == (pytest.approx(0.49016, abs=1e-5), pytest.approx(0.94331, abs=1e-5))  # Wilson 1927, 8 of 10


def test_none_or_all_correct_is_not_certain_and_few_differences_have_no_interval():
    for value in (0.0, 1.0):
        result = estimate_mean([value] * 20, 4)
        assert result.low <= value <= result.high and result.high - result.low == pytest.approx(0.161, abs=0.001)  # "3 of n" and a little
    assert estimate_difference([0.25] * 10).low is None is estimate_difference([1.0, 0.0, 1.0]).high


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_an_interval_holds_its_value_and_stays_between_0_and_1(correct):
    result = estimate_mean([count / 4 for count in correct], 4)
    assert 0 <= result.low <= result.value <= result.high <= 1


@pytest.mark.parametrize("samples, shape", [(1, 1.0), (4, 0.3), (8, 2.0)])
def test_95_of_100_intervals_cover_the_truth(samples, shape):
    draw = random.Random(7)
    covered = 0
    for _ in range(1000):
        chances = [draw.betavariate(shape, shape) for _ in range(40)]
        result = estimate_mean([sum(draw.random() < chance for _ in range(samples)) / samples for chance in chances], samples)
        covered += result.low <= 0.5 <= result.high
    assert 0.93 <= covered / 1000 <= 0.98


def test_intervals_of_differences_cover_the_truth_and_p_values_are_uniform_without_one():
    draw = random.Random(9)
    covered, small = 0, 0
    for _ in range(1000):
        chances = [draw.betavariate(0.5, 0.5) for _ in range(30)]
        first, second = ([sum(draw.random() < chance for _ in range(4)) for chance in chances] for _ in range(2))
        gains = [score - other for score, other in zip(first, second, strict=True)]
        result = estimate_difference([gain / 4 for gain in gains])
        covered += result.low is not None and result.low <= 0 <= result.high
        small += sign_flip_p_value(gains) <= 0.05
    assert 0.93 <= covered / 1000 <= 0.98
    assert 0.02 <= small / 1000 <= 0.06


def test_near_0_and_1_and_for_alike_problems_the_number_of_problems_counts():
    """Effective sizes jumped to that of all completions: [.977, .999] of 239 of 240, [.998, 1] of 30 alike, +-.085 of two problems."""
    all_right, one_wrong = estimate_mean([1.0] * 30, 8), estimate_mean([1.0] * 29 + [0.875], 8)
    assert (all_right.low, all_right.high) == (pytest.approx(0.8865, abs=1e-3), 1.0)
    assert abs(one_wrong.low - all_right.low) < 0.03 and one_wrong.high > 0.999
    assert estimate_mean([pass_at_k(30, 64, 32)] * 30, 64).low < 0.89
    two = estimate_mean([0.5] * 2, 64)
    assert two.high - two.low > 0.8


@pytest.mark.parametrize("problems", [5, 8, 15, 40])
@pytest.mark.parametrize("samples", [4, 16, 64])
@pytest.mark.parametrize("a, b", [(0.3, 0.3), (1.0, 1.0), (50.0, 50.0), (0.1, 1.9), (0.5, 4.5), (9.0, 1.0)])
def test_intervals_cover_from_five_problems_on(problems, samples, a, b):
    draw, covered = np.random.default_rng(11), 0
    for _ in range(1500):
        values = draw.binomial(samples, draw.beta(a, b, problems)) / samples
        estimate = estimate_mean(values.tolist(), samples)
        covered += estimate.low <= a / (a + b) <= estimate.high
    assert covered >= 0.93 * 1500
