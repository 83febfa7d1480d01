"""Mismatch against the position in the answer, from the samples that runs recorded.

A row of samples.jsonl has (tokens, mean |Δ log p|) of every `SAMPLE_BIN` positions of its answer. Tokens of one answer go together, so
every standard error counts answers, not tokens. The late positions belong to the long answers alone: the slope is taken within
answers, each against its own mean, so that long answers of another kind do not pass for growth.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import NamedTuple

from megatron_rl.observability.run_log import read_jsonl
from megatron_rl.training.mismatch import SAMPLE_BIN

Answer = Sequence[tuple[int, float]]
"""(tokens, mean |Δ log p| in nats) of every `SAMPLE_BIN` positions."""


class Estimate(NamedTuple):
    """A value with its standard error."""

    value: float
    error: float


class Bin(NamedTuple):
    """The tokens of all answers at positions [start, end)."""

    start: int
    end: int
    tokens: int
    mean: Estimate


def read_answers(run: Path) -> list[Answer]:
    """Return what a run recorded of its answers."""
    return [row["mismatch"] for row in read_jsonl(run / "samples.jsonl")[0] if row.get("mismatch")]


def average_by_bin(answers: Sequence[Answer], bins: int = 8) -> list[Bin]:
    """Return the mean over tokens in at most `bins` bins of equal width, a multiple of `SAMPLE_BIN`, up to the longest answer."""
    longest = max(map(len, answers), default=0)
    width = -(-longest // bins)
    averages = []
    for first in range(0, longest, max(width, 1)):
        parts = [_sum_tokens(answer[first : first + width]) for answer in answers]
        present = [(tokens, total) for tokens, total in parts if tokens]
        averages.append(Bin(first * SAMPLE_BIN, (first + width) * SAMPLE_BIN, sum(tokens for tokens, _ in present), _ratio(present)))
    return averages


def estimate_slope(answers: Sequence[Answer]) -> Estimate | None:
    """Return the growth of |Δ log p| over 100 positions of an answer: least squares over tokens, within answers; None for answers that are
    all shorter than two bins."""
    clusters = []
    for answer in answers:
        points = [(SAMPLE_BIN * index + tokens / 2, tokens, value) for index, (tokens, value) in enumerate(answer) if tokens]
        if len(points) < 2:
            continue
        total = sum(tokens for _, tokens, _ in points)
        x_mean = sum(tokens * x for x, tokens, _ in points) / total
        y_mean = sum(tokens * y for _, tokens, y in points) / total
        clusters.append([((x - x_mean) / 100, tokens, y - y_mean) for x, tokens, y in points])
    spread = sum(tokens * x * x for cluster in clusters for x, tokens, _ in cluster)
    if not spread:
        return None
    slope = sum(tokens * x * y for cluster in clusters for x, tokens, y in cluster) / spread
    squares = sum(sum(tokens * x * (y - slope * x) for x, tokens, y in cluster) ** 2 for cluster in clusters)
    return Estimate(slope, sqrt(squares) / spread * _correct(len(clusters)))


def _sum_tokens(parts: Answer) -> tuple[int, float]:
    return sum(tokens for tokens, _ in parts), sum(tokens * value for tokens, value in parts)


def _ratio(clusters: Sequence[tuple[int, float]]) -> Estimate:
    """Return sum of totals over sum of tokens, with the error of a ratio over clusters (Cochran, Sampling Techniques, 2.11)."""
    tokens = sum(count for count, _ in clusters)
    mean = sum(total for _, total in clusters) / tokens
    squares = sum((total - mean * count) ** 2 for count, total in clusters)
    return Estimate(mean, sqrt(squares) / tokens * _correct(len(clusters)))


def _correct(clusters: int) -> float:
    """Return the correction for the few clusters that there are; NaN for one, which says nothing of the spread."""
    return sqrt(clusters / (clusters - 1)) if clusters > 1 else float("nan")
