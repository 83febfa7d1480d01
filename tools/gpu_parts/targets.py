"""The figures to beat, and rows that stand beside them. What is not met is told, and is no fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_parts.rows import Row, Rows

TO_BEAT = {"actor update": 1.54, "reference forward": 1.80, "rollout": 1.33, "whole step": 1.16, "sync": 0.80}
"""Speed over BF16 that Jet-RL reports for models of 8B and 32B (arXiv 2601.14243); of the sync, the share of a device copy's speed."""


def add(rows: Rows, target: str, what: str, found: str, ratio: float, **numbers: Any) -> None:
    """A row with `ratio` held against `TO_BEAT[target]`."""
    to_beat = TO_BEAT[target]
    told = f"{found}; to beat: {to_beat:.2f}x, {verdict(ratio, to_beat)}"
    rows.add(what, told, None, **numbers, target=target, to_beat=to_beat, reached=ratio)


def verdict(ratio: float, to_beat: float) -> str:
    return "met" if ratio >= to_beat else "not met"


def reached(rows: Sequence[Row]) -> list[tuple[str, str, float, float, str]]:
    """(target, what was measured, ratio, to beat, met or not met) of all rows that `add` wrote."""
    held = [(row.what, row.numbers) for row in rows if "to_beat" in row.numbers]
    return [(n["target"], what, n["reached"], n["to_beat"], verdict(n["reached"], n["to_beat"])) for what, n in held]
