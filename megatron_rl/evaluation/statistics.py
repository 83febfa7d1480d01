"""Estimators of an evaluation, and how sure they are. Pure: counts in, numbers out.

A problem is one draw from all problems of its kind, and its K completions share it: intervals are clustered by problem, that is, they
come from the spread *between* problems (E. Miller, "Adding Error Bars to Evals", arXiv 2411.00640), never from counting all completions
as if they were independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean, variance

import numpy as np

CONFIDENCE = 0.95
MOST_SAMPLES = 1024
"""Completions per problem for which `majority_at_k` stays within float64: binomials up to C(1024, 512)."""
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_FEWEST_PAIRS = 4


@dataclass(frozen=True)
class Estimate:
    """A value and its interval at `CONFIDENCE`; `low` and `high` are None where the data allow none."""

    value: float
    low: float | None
    high: float | None


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and `most` itself."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased estimate that one of k completions is correct: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    return 1 - comb(samples - correct, k) / comb(samples, k)


def majority_at_k(votes: Sequence[tuple[int, int]], samples: int, ks: Sequence[int]) -> list[float]:
    """Expected maj@k of one problem for each k: the share of all C(samples, k) sub-samples whose most frequent answer is correct.

    `votes` holds one (completions, correct ones among them) per answer. Completions without an answer (the rest of `samples`) have no
    vote; a sub-sample without any vote is wrong. Among answers that tie, each wins alike often. An answer whose completions were not all
    judged alike counts by their share.

    Exact, by generating functions: let the answer in question get j votes. The others' factor is sum_i C(n, i) x^i over i <= j, with y for
    i = j; the coefficient of x^(k-j) y^t counts sub-samples in which t others tie, of which 1 / (t+1) are won.
    """
    found = np.zeros(len(ks))
    silent = samples - sum(count for count, _ in votes)
    for index, (count, correct) in enumerate(votes):
        if correct:
            others = [other for place, (other, _) in enumerate(votes) if place != index]
            found += correct / count * _wins(count, others, silent, samples, ks)
    return found.tolist()


def _wins(count: int, others: Sequence[int], silent: int, samples: int, ks: Sequence[int]) -> np.ndarray:
    """Share of the sub-samples of each size k that an answer with `count` votes wins: float64 [len(ks)]."""
    ways = np.zeros(len(ks))
    for mine in range(1, count + 1):
        rest = samples - mine
        harmless = silent + sum(other for other in others if other < mine)  # too few to win or to tie, however many are drawn
        table = np.zeros((rest // mine + 1, rest + 1))  # [others that tie, what all others draw]
        table[0] = [comb(harmless, drawn) for drawn in range(rest + 1)]
        for other in (other for other in others if other >= mine):
            grown = np.zeros_like(table)
            for theirs in range(mine):
                grown[:, theirs:] += comb(other, theirs) * table[:, : rest + 1 - theirs]
            grown[1:, mine:] += comb(other, mine) * table[:-1, : rest + 1 - mine]
            table = grown
        won = (table / np.arange(1, len(table) + 1)[:, None]).sum(0) * comb(count, mine)
        ways += [won[k - mine] if k >= mine else 0.0 for k in ks]
    return ways / np.array([float(comb(samples, k)) for k in ks])


def estimate_mean(values: Sequence[float], samples: int) -> Estimate:
    """Mean over problems of values in 0..1, each from `samples` completions, with Wilson's interval for n_eff independent draws.

    SE^2 = s^2 / n from the spread between problems; n_eff = m (1 - m) / SE^2 is the number of coin tosses that are as uncertain (Kish's
    effective sample size; with Wilson's interval: Franco et al. 2019, J. Survey Stat. Methodol. 7). It is kept between n and n * samples,
    so one completion per problem gives Wilson's own interval, and none or all correct gives one that is not empty.
    """
    count, mean = len(values), fmean(values)
    spread = variance(values) / count if count > 1 else 0.0
    if spread:
        effective = min(max(mean * (1 - mean) / spread, count), count * samples)
    else:
        effective = count * samples if 0 < mean < 1 and count > 1 else count
    scale = 1 + _Z**2 / effective
    middle = (mean + _Z**2 / (2 * effective)) / scale
    half = _Z / scale * sqrt(mean * (1 - mean) / effective + _Z**2 / (4 * effective**2))
    return Estimate(mean, min(max(middle - half, 0.0), mean), max(min(middle + half, 1.0), mean))


def estimate_difference(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences, one per problem, with Student's interval (arXiv 2411.00640, section 4).

    No interval for fewer than four problems, nor where all differ alike.
    """
    count, mean = len(differences), fmean(differences)
    spread = variance(differences) if count >= _FEWEST_PAIRS else 0.0
    if not spread:
        return Estimate(mean, None, None)
    half = _student(count - 1) * sqrt(spread / count)
    return Estimate(mean, mean - half, mean + half)


def _student(freedom: int) -> float:
    """Student's quantile at `CONFIDENCE`, two-sided: Abramowitz and Stegun 26.7.5, within 1 % from three degrees of freedom on."""
    z = _Z
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def sign_flip_p_value(differences: Sequence[int]) -> float:
    """Two-sided p-value of Fisher's randomisation test of paired differences: the share of all 2^n choices of signs whose sum is at
    least as far from 0 as the sum seen.

    `differences` are whole numbers (correct completions of one checkpoint less those of the other, per problem), so all choices are counted
    exactly, by adding one problem after the other to the distribution of the sum. 1.0 where nothing differs. With one completion
    per problem it is McNemar's exact test.
    """
    sizes = [abs(difference) for difference in differences if difference]
    seen, most = abs(sum(differences)), sum(sizes)
    chance = np.zeros(2 * most + 1)  # of each sum, -most..most
    chance[most] = 1.0
    for size in sizes:
        chance = (np.roll(chance, size) + np.roll(chance, -size)) / 2  # nothing wraps around: sums so far are small enough
    sums = np.abs(np.arange(-most, most + 1))
    return min(1.0, float(chance[sums >= seen].sum()))
