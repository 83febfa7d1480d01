"""Estimators for evaluations, with confidence intervals. Pure functions of counts.

A problem is one draw from all problems of its kind, and its K completions share it. Intervals are therefore clustered by problem: they come
from the spread *between* problems (E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640), not from treating all completions as
independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, pi, sqrt, tan
from statistics import NormalDist, fmean, variance

import numpy as np

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_FEWEST_PAIRS = 4
_ADDED = 0.25
"""Pseudo-problems added at 0 and at 1: the smallest number whose intervals cover 95 % in simulations with 5 or more problems."""


@dataclass(frozen=True)
class Estimate:
    """A value and its interval at `CONFIDENCE`. `low` and `high` are None if the data do not allow an interval."""

    value: float
    low: float | None
    high: float | None


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    return 1 - comb(samples - correct, k) / comb(samples, k)


def majority_at_k(votes: Sequence[tuple[int, int]], samples: int, ks: Sequence[int]) -> list[float]:
    """Return the expected maj@k of one problem for each k: the share of all C(samples, k) subsets that vote for a correct answer.

    `votes` holds (completions, correct completions) per answer. Completions without an answer (the rest of `samples`) do not vote; a subset
    without votes is wrong. Tied answers win equally often. If only some completions of an answer are correct, it counts by their share.

    The result is exact, by generating functions. Let the answer get j votes. Each other answer contributes sum_i C(n, i) x^i over i <= j,
    with a factor y for i = j. The coefficient of x^(k-j) y^t counts subsets in which t others tie, of which 1 / (t+1) are won.
    """
    shares = np.zeros(len(ks))
    without_vote = samples - sum(count for count, _ in votes)
    for index, (count, correct) in enumerate(votes):
        if correct:
            others = [other for other_index, (other, _) in enumerate(votes) if other_index != index]
            shares += correct / count * _win_share(count, others, without_vote, samples, ks)
    return np.minimum(shares, 1.0).tolist()  # rounding could exceed 1


def _win_share(count: int, others: Sequence[int], without_vote: int, samples: int, ks: Sequence[int]) -> np.ndarray:
    """Return, for each k, the share of subsets of size k that an answer with `count` votes wins, float64 [len(ks)]."""
    ways = np.zeros(len(ks))
    for drawn in range(1, count + 1):  # votes for the answer in the subset
        rest = samples - drawn
        harmless = without_vote + sum(other for other in others if other < drawn)  # these can neither win nor tie
        table = np.zeros((rest // drawn + 1, rest + 1))  # [tied answers, votes for all other answers]
        table[0] = [comb(harmless, votes) for votes in range(rest + 1)]
        for other in (other for other in others if other >= drawn):
            next_table = np.zeros_like(table)
            for votes in range(drawn):
                next_table[:, votes:] += comb(other, votes) * table[:, : rest + 1 - votes]
            next_table[1:, drawn:] += comb(other, drawn) * table[:-1, : rest + 1 - drawn]
            table = next_table
        won = (table / np.arange(1, len(table) + 1)[:, None]).sum(0) * comb(count, drawn)
        ways += [won[k - drawn] if k >= drawn else 0.0 for k in ks]
    return ways / np.array([float(comb(samples, k)) for k in ks])


def estimate_mean(values: Sequence[float], samples: int) -> Estimate:
    """Return the mean over problems of values in 0..1, each from `samples` completions, with Wilson's interval for n_eff independent draws.

    n_eff = n m (1 - m) / s^2, with s^2 the variance between problems, is Kish's effective sample size (Franco et al. 2019, J. Survey Stat.
    Methodol. 7), clamped to n..n * samples. A quarter of a pseudo-problem is added at 0 and at 1 when m and s^2 are
    computed, because problems that hardly differ, especially near 0 and 1, do not prove that none differs. The quantile is Student's with
    n - 1 degrees of freedom, because s^2 is estimated. With one completion per problem this is Wilson's interval.
    """
    count, mean = len(values), fmean(values)
    effective, quantile = float(count), _Z
    if samples > 1 and count > 1:
        added = [*((value, 1.0) for value in values), (0.0, _ADDED), (1.0, _ADDED)]
        weight = count + 2 * _ADDED
        centre = sum(value * share for value, share in added) / weight
        spread = sum(share * (value - centre) ** 2 for value, share in added) / (weight - 1)
        effective = min(max(count * centre * (1 - centre) / spread, count), count * samples)
        if 0 < mean < 1:
            quantile = _student_quantile(count - 1)
    scale = 1 + quantile**2 / effective
    middle = (mean + quantile**2 / (2 * effective)) / scale
    half = quantile / scale * sqrt(mean * (1 - mean) / effective + quantile**2 / (4 * effective**2))
    return Estimate(mean, min(max(middle - half, 0.0), mean), max(min(middle + half, 1.0), mean))


def estimate_difference(differences: Sequence[float]) -> Estimate:
    """Return the mean of paired differences, one per problem, with Student's interval (arXiv 2411.00640, section 4).

    There is no interval for fewer than four problems, or if all differences are equal.
    """
    count, mean = len(differences), fmean(differences)
    spread = variance(differences) if count >= _FEWEST_PAIRS else 0.0
    if not spread:
        return Estimate(mean, None, None)
    half = _student_quantile(count - 1) * sqrt(spread / count)
    return Estimate(mean, mean - half, mean + half)


def _student_quantile(freedom: int) -> float:
    """Return Student's two-sided quantile at `CONFIDENCE`: exact for one and two degrees of freedom, within 1 % for more (Abramowitz and
    Stegun 26.7.5)."""
    if freedom <= 2:
        return tan(pi * CONFIDENCE / 2) if freedom == 1 else CONFIDENCE * sqrt(2 / (1 - CONFIDENCE**2))
    z = _Z
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def sign_flip_p_value(differences: Sequence[int]) -> float:
    """Return the two-sided p-value of Fisher's randomization test of paired differences.

    This is the share of all 2^n choices of signs whose sum is at least as far from 0 as the observed sum, or 1.0 if nothing differs.
    `differences` are integers (correct completions of one checkpoint minus those of the other, per problem), so the distribution of the sum
    is computed exactly, one problem at a time. With one completion per problem this is McNemar's exact test.
    """
    sizes = [abs(difference) for difference in differences if difference]
    observed, largest = abs(sum(differences)), sum(sizes)
    probability = np.zeros(2 * largest + 1)  # of the sums -largest..largest
    probability[largest] = 1.0
    for size in sizes:
        probability = (np.roll(probability, size) + np.roll(probability, -size)) / 2  # the sums so far are too small to wrap around
    sums = np.abs(np.arange(-largest, largest + 1))
    return min(1.0, float(probability[sums >= observed].sum()))
