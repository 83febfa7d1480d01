"""Tests of the draws: an engine that reports right log-probs but draws other tokens is found, simulated with a model of bigrams."""

import pytest
from support.simulated_draws import FILTERED, SimulatedRun

from megatron_rl.errors import RunError

LENGTH = 64
FOUND = {
    "temperature twice": "draws/surprise", "biased token": "draws/token", "greedy": "draws/surprise", "one seed": "draws/same_position",
    "one number": "draws/successive", "penalty": "draws/surprise", "banned token": "draws/token",
    "previous distribution": "draws/surprise", "kept set off by one": "draws/token", "reported set off by one": "draws/filtered",
    "min-p ignored": "draws/filtered",
}  # fmt: skip
"""The test that an engine's own random numbers cannot hide a fault from."""


@pytest.mark.parametrize("fault", ["", "filters"])
def test_right_draws_pass_every_test(fault):
    run = SimulatedRun(fault, 32, LENGTH, seeded=True)
    for number in range(4):
        metrics = run.step(number)
        assert metrics["draws/other"] == metrics["draws/filtered"] == metrics["draws/failed"] == 0
        assert metrics["draws/checked"] == 32 * LENGTH and abs(metrics["draws/surprise"]) < 5
    assert not run.told


@pytest.mark.parametrize("fault", FOUND)
def test_draws_that_are_a_function_of_the_seed_are_repeated(fault):
    what = "draws/filtered" if fault in FILTERED[1:] else "draws/other"
    with pytest.raises(RunError, match=rf"^{what}: .* sample \d+, position \d+|of sample \d+ the engine sampled token \d+"):
        SimulatedRun(fault, 8, LENGTH, seeded=True).step(0)


@pytest.mark.parametrize("fault, name", FOUND.items())
def test_draws_of_any_engine_are_tested_for_their_distribution(fault, name):
    run = SimulatedRun(fault, 64, LENGTH, seeded=False)
    for number in range(8):
        run.step(number)
        if name in {line.split(" ")[0].rstrip(":") for line in run.told}:
            return
    raise AssertionError(run.told)
