"""Every algorithm through the real loop and a real FP8 trainer: it learns what is rewarded, and reports what it did."""

from __future__ import annotations

import math

import pytest
from support import training_runs
from support.models import FP8

from megatron_rl.config.algorithm import PRESETS

STEPS = 3


def run(worlds, checkpoint, noise: float = 0.02, **algorithm: object) -> dict:
    result = worlds(1).call(training_runs.run_loop, checkpoint, FP8, {"updates_per_step": 2, **algorithm}, STEPS, noise)[0]
    assert len(result["rows"]) == STEPS + 1 and all(math.isfinite(value) for row in result["rows"] for value in row.values())
    return result


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_makes_rewarded_answers_likelier(worlds, checkpoint, name):
    """Steps of 1e-3 by Adam move a random model by far more than 0.1 nats; a wrong sign would move it the other way."""
    result = run(worlds, checkpoint, name=name, kl_coef=0.001)
    assert result["leads"][-1] > result["leads"][0] + 0.1
    assert all((advantage > 0) == bool(number % 2) for number, advantage in enumerate(result["advantages"]))
    assert ("loss/kl" in result["rows"][-1]) == (name != "rloo") and ("reward/kl" in result["rows"][-1]) == (name == "rloo")


@pytest.mark.parametrize("correction", ["tis", "sequence_tis", "icepop", "geometric_mask"])
def test_corrections_are_reported(worlds, checkpoint, correction):
    row = run(worlds, checkpoint, correction=correction, correction_cap=1.01)["rows"][-1]
    touched = row["correction/touched_positive"] + row["correction/touched_negative"]
    assert 0.5 < row["correction/mean_positive"] <= row["correction/max_positive"] < 1.2 or correction == "geometric_mask"
    assert (touched > 0) == (correction != "icepop"), "noise of 2 % passes the cap and the tight bounds, not [0.5, 5]"


def test_the_engines_log_probs_as_the_old_ones_clip_what_the_engine_got_wrong(worlds, checkpoint):
    """Noise of 0.5 nats is outside of the clip before the first update already."""
    trainer, engine = (run(worlds, checkpoint, noise=0.5, updates_per_step=1, old_policy=old)["rows"][-1] for old in ("trainer", "engine"))
    assert trainer["clip/positive"] + trainer["clip/negative"] == 0
    assert engine["clip/positive"] + engine["clip/negative"] > 0.1


def test_calibrated_bounds_move_every_so_many_steps(worlds, checkpoint):
    rows = run(worlds, checkpoint, calibrate_every=2, correction="tis")["rows"][1:]
    bounds = [(row["clip/bound_low"], row["clip/bound_high"]) for row in rows]
    assert bounds[1] == bounds[0], "the second step is none of calibration"
    assert all(abs(low - 0.8) <= 0.1 and abs(high - 1.2) <= 0.2 for low, high in bounds)
