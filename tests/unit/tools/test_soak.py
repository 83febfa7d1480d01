"""tools/soak.py plans the same kills for the same seed, and finds each kind of fault in a run's records."""

import pytest
from soak import Promise, find_inexact, find_wrong_samples, plan_kills

PROMISE = Promise([f"p{position}" for position in range(10)], frozenset({6, 9}), steps=4, prompts=2, group_size=2, max_staleness=1)
RIGHT = [[0, 1], [2, 4], [3, 5], [7, 8]]
"""Problem 3 was aborted in step 2; problems 6 and 9 were drawn and not trained on."""


def record(steps: list[list[int]] = RIGHT) -> list[dict]:
    return [
        {"step": step, "problem": f"p{position}", "versions": [max(step - 2, 0), step - 1]}
        for step, positions in enumerate(steps, 1)
        for position in positions
        for _ in range(2)
    ]


def changed(row: int, **values: object) -> list[dict]:
    rows = record()
    rows[row] = {**rows[row], **values}
    return rows


def test_the_same_seed_plans_the_same_kills():
    first, again, other = (plan_kills(200, 12, seed, engines=2) for seed in (3, 3, 4))
    assert first == again and first != other and {kill.victim for kill in first} == {"engine", "all engines", "trainer"}
    steps = [kill.step for kill in first]
    assert steps == sorted(set(steps)) and len(steps) == 12 and steps[0] >= 0 and steps[-1] < 199
    assert {kill.victim for kill in plan_kills(200, 12, 3, engines=1)} == {"engine", "trainer"}


@pytest.mark.parametrize(
    "rows, faults",
    [
        (record(), []),
        (record([*RIGHT[:3], [8, 9]]), ["problem 9 (p9) was trained on and is still owed", "problem 7 (p7) is lost"]),
        (record([*RIGHT[:3], [5, 8]]), ["step 4: p5 was trained on before, or never drawn", "problem 7 (p7) is lost"]),
        (record([RIGHT[0], [4, 2], *RIGHT[2:]]), ["step 2: problems in the order [4, 2]"]),
        (record([[0, 2], [3, 4], [5, 7], [1, 8]]), ["step 4: problem 1 comes 3 steps after a later one"]),
        (record()[:-1], ["step 4: 3 samples, not 2 whole groups of 2"]),
        ([record()[index] for index in (0, 2, 1, *range(3, 16))], ["step 1: 4 samples, not 2 whole groups of 2"]),
        (changed(8, versions=[0, 2]), ["step 3: tokens of versions 0 to 2"]),
        (changed(0, versions=[0, 1]), ["step 1: tokens of versions 0 to 1"]),
        ([row for row in record() if row["step"] != 2], ["samples of steps [1, 3, 4], not of 1 to 4"]),
    ],
)
def test_each_fault_is_found(rows, faults):
    found = find_wrong_samples(rows, PROMISE)
    assert found[: len(faults)] == faults and (faults or not found)


def test_a_mismatch_an_unproved_sync_and_missing_measurements_are_found():
    proved = {"sync/proved": 3, "sync/tensors": 3}
    rows = [{"step": 0, **proved}, {"step": 1, "mismatch/abs_max": 0.0, **proved}]
    assert find_inexact(rows) == []
    assert find_inexact(rows[:1]) == ["no token of the trainer's own version was compared"]
    assert find_inexact([*rows, {"step": 2, "mismatch/abs_max": 1e-6, **proved}]) == ["step 2: mismatch of 1e-06"]
    assert find_inexact([*rows, {"step": 2, "sync/proved": 2, "sync/tensors": 3}]) == ["step 2: not proved"]
