"""inf and NaN are named and stop a step before anything of the policy changes."""

from __future__ import annotations

import pytest
from support import trainer
from support.models import FP8, FP32, random_sequences

from megatron_rl.errors import RunError
from parallel.layout import Layout

WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"
LINES = {
    "loss": "the loss of optimizer step 2 is nan",
    "gradient": "holds inf or NaN in optimizer step 2",
    "activation": "the first module with inf or NaN in its output is decoder.layers.1.mlp.linear_fc1",
}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=str)
def test_a_nan_in_a_weight_is_named_on_every_rank(worlds, checkpoint, layout):
    with pytest.raises(RunError, match=f"{WEIGHT}: weight holds inf or NaN"):
        worlds(layout.world_size).call(trainer.poison_weight, checkpoint, FP8, WEIGHT, layout)


@pytest.mark.parametrize(
    "layout, precision",
    [(Layout(), FP32), (Layout(tp=2), FP8), (Layout(tp=2), FP32), (Layout(pp=2), FP8), (Layout(dp=2), FP8)],
    ids=["one rank, fp32", "tp2, fp8", "tp2, fp32", "pp2, fp8", "dp2, fp8"],
)
def test_an_update_that_is_not_finite_changes_no_byte(worlds, checkpoint, layout, precision):
    faults = [fault for fault in LINES if fault != "activation" or layout.pp == 1]  # the hook is on a layer of the second stage
    for rank_results in worlds(layout.world_size).call(
        trainer.poison_updates, checkpoint, precision, random_sequences(4, seed=3), faults, layout
    ):
        assert list(rank_results) == faults
        for fault, (message, changed) in rank_results.items():
            assert LINES[fault] in message and changed == [], fault
