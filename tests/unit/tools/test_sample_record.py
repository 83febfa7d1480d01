"""The judge of a run's record of samples sees each kind of fault, and none in a record that keeps every promise."""

from __future__ import annotations

import copy
import sys

import pytest
from support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools" / "checks"))

from sample_record import Promise, find_inexact, find_wrong_samples

PROMISE = Promise([f"p{position}" for position in range(10)], frozenset({6, 9}), steps=4, prompts=2, group_size=2, max_staleness=1)
RIGHT = [[0, 1], [2, 4], [3, 5], [7, 8]]
"""Position 3 was aborted in step 2, and 6 and 9 are drawn and not trained on."""


def record(steps: list[list[int]]) -> list[dict]:
    return [
        {"step": step, "problem": f"p{position}", "versions": [max(step - 2, 0), step - 1]}
        for step, positions in enumerate(steps, 1)
        for position in positions
        for _ in range(2)
    ]


def change(name: str) -> list[dict]:
    steps = copy.deepcopy(RIGHT)
    if name == "lost":
        steps[3] = [8, 9]
    elif name == "doubled":
        steps[3] = [5, 8]
    elif name == "disorder":
        steps[1] = [4, 2]
    elif name == "late":
        steps = [[0, 2], [3, 4], [5, 7], [1, 8]]
    rows = record(steps)
    if name == "part of a group":
        rows.pop()
    elif name == "mixed groups":
        rows[1], rows[2] = rows[2], rows[1]
    elif name == "old":
        rows[8]["versions"] = [0, 2]
    elif name == "from the future":
        rows[0]["versions"] = [0, 1]
    elif name == "a step is missing":
        rows = [row for row in rows if row["step"] != 2]
    return rows


def test_a_record_that_keeps_all_promises_has_no_fault():
    assert find_wrong_samples(record(RIGHT), PROMISE) == []


@pytest.mark.parametrize(
    "name, faults",
    [
        ("lost", ["problem 9 (p9) was trained on and is owed still", "problem 7 (p7) is lost"]),
        ("doubled", ["step 4: p5 was trained on before, or never drawn", "problem 7 (p7) is lost"]),
        ("disorder", ["step 2: problems in the order [4, 2]"]),
        ("late", ["step 4: problem 1 comes 3 steps after a later one"]),
        ("part of a group", ["step 4: 3 samples, not 2 whole groups of 2"]),
        ("mixed groups", ["step 1: 4 samples, not 2 whole groups of 2"]),
        ("old", ["step 3: tokens of versions 0 to 2"]),
        ("from the future", ["step 1: tokens of versions 0 to 1"]),
        ("a step is missing", ["samples of steps [1, 3, 4], not of 1 to 4"]),
    ],
)
def test_each_fault_is_seen(name, faults):
    assert find_wrong_samples(change(name), PROMISE)[: len(faults)] == faults


def test_inexact_and_unproved_rows_are_seen_and_that_nothing_was_measured():
    proved = {"sync/proved": 3, "sync/tensors": 3}
    rows = [{"step": 0, **proved}, {"step": 1, "mismatch/abs_max": 0.0, **proved}]
    assert find_inexact(rows) == []
    assert find_inexact(rows[:1]) == ["no token of the trainer's own version was compared"]
    assert find_inexact([*rows, {"step": 2, "mismatch/abs_max": 1e-6, **proved}]) == ["step 2: mismatch of 1e-06"]
    assert find_inexact([*rows, {"step": 2, "sync/proved": 2, "sync/tensors": 3}]) == ["step 2: not proved"]
