"""Counts, FP64 sums and maxima of per-token values, combined over data-parallel replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Total:
    """The values of one name."""

    count: int
    sum: float
    largest: float


class Totals:
    def __init__(self, by_name: dict[str, Total] | None = None) -> None:
        self.by_name = by_name or {}

    @classmethod
    def merge(cls, parts: Iterable[Totals]) -> Totals:
        merged = cls()
        for part in parts:
            for name, total in part.by_name.items():
                merged._add(name, total)
        return merged

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add values of any shape and dtype."""
        if values.numel():
            self._add(name, Total(values.numel(), float(values.double().sum()), float(values.max())))

    def _add(self, name: str, total: Total) -> None:
        known = self.by_name.get(name, Total(0, 0.0, total.largest))
        largest = known.largest if known.largest > total.largest or math.isnan(known.largest) else total.largest  # keeps NaN
        self.by_name[name] = Total(known.count + total.count, known.sum + total.sum, largest)

    def count(self, name: str) -> int:
        return self.by_name[name].count if name in self.by_name else 0

    def mean(self, name: str) -> float:
        """Return the mean, or 0 without values."""
        return self.by_name[name].sum / self.by_name[name].count if name in self.by_name else 0.0

    def largest(self, name: str) -> float:
        """Return the maximum, or 0 without values."""
        return self.by_name[name].largest if name in self.by_name else 0.0


Combine = Callable[[Totals], Totals]  # combines this replica's totals with all others'; collective (`mcore.passes.reduce.combine`)


def combine_alone(totals: Totals) -> Totals:
    """Return the totals unchanged: the `Combine` of a single replica."""
    return totals
