"""The mismatch attributed by cause: each planted cause shows in its own rung and in no other, and the rungs add up to the whole."""

from __future__ import annotations

import pytest
from support import training_runs
from support.models import FP8, FP32, random_sequences

from megatron_rl.training.mismatch_attribution import CAUSES

SUMMED = ("mean", "k3")
ROLLOUT = {mode: {"mode": mode, "high": "fp32"} for mode in ("fp8_rollout", "int8_rollout")}


def attributed(world, checkpoint, precision: dict, fault: str = "") -> dict[str, float]:
    """|d| by cause. Every rank is told the same, and the causes add up to the total: float64 sums of a few hundred tokens."""
    found, *others = world.call(training_runs.measure_causes, checkpoint, precision, random_sequences(8, 3), fault)
    assert all(other == found for other in others)
    for what in SUMMED:
        total = found[f"mismatch/cause/total/{what}"]
        assert sum(found[f"mismatch/cause/{cause}/{what}"] for cause in CAUSES) == pytest.approx(total, abs=1e-12)
    return {cause: found[f"mismatch/cause/{cause}/abs_mean"] for cause in (*CAUSES, "total")}


@pytest.mark.parametrize("fault", CAUSES)
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_in_unified_fp8_a_planted_cause_is_found_in_its_rung(one, checkpoint, fault, scale_format):
    """All others are exactly 0: the same bytes, the same products, the same order of sums."""
    found = attributed(one, checkpoint, FP8 | {"scale_format": scale_format}, fault)
    assert {cause for cause in CAUSES if found[cause]} == {fault}
    assert found[fault] == found["total"] > 1e-3


@pytest.mark.parametrize("precision", [FP8, FP32], ids=["fp8_unified", "bf16"])
def test_one_precision_flow_has_nothing_to_attribute(one, two, checkpoint, precision):
    for world in (one, two):
        assert set(attributed(world, checkpoint, precision).values()) == {0.0}


@pytest.mark.parametrize("mode", ROLLOUT)
def test_a_quantised_engine_differs_by_its_weights_and_by_its_inputs(one, two, checkpoint, mode):
    for world in (one, two):
        found = attributed(world, checkpoint, ROLLOUT[mode])
        assert found["kernels"] == found["version"] == 0
        assert found["activations"] > 1e-3 and found["weights"] > 1e-3


def test_a_changed_weight_and_a_version_are_found_beside_the_quantisation(one, checkpoint):
    plain = attributed(one, checkpoint, ROLLOUT["fp8_rollout"])
    weights, version = (attributed(one, checkpoint, ROLLOUT["fp8_rollout"], fault) for fault in ("weights", "version"))
    assert weights["weights"] > 1.2 * plain["weights"] and weights["version"] == weights["kernels"] == 0
    assert version["version"] > 1e-3 and [version[name] for name in CAUSES[:3]] == [plain[name] for name in CAUSES[:3]]


def test_the_loop_attributes_every_so_many_steps(one, checkpoint):
    noise = 0.02
    found = one.call(training_runs.run_loop, checkpoint, FP8, {"updates_per_step": 2, "correction": "tis"}, 3, noise, 2)[0]
    rows = found["rows"]
    assert ["mismatch/cause/total/mean" in row for row in rows] == [False, False, True, False]
    causes = {cause: rows[2][f"mismatch/cause/{cause}/abs_mean"] for cause in CAUSES}
    assert causes["activations"] == causes["weights"] == 0 < causes["version"]
    assert causes["kernels"] == pytest.approx(rows[2]["mismatch/abs_mean"], rel=1e-6) and 0.3 * noise < causes["kernels"] < noise
