"""inf and NaN stop a step, by name, before anything of the policy has changed."""

from __future__ import annotations

import pytest
from support import trainer
from support.models import FP8, FP32, random_sequences

from megatron_rl.errors import RunError

WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_in_a_weight_is_named(one, two, checkpoint, ranks):
    with pytest.raises(RunError, match=f"{WEIGHT}: weight holds inf or NaN"):
        {1: one, 2: two}[ranks].call(trainer.poison_weight, checkpoint, FP8, WEIGHT)


@pytest.mark.parametrize("precision", [FP8, FP32], ids=["fp8", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how, line",
    [
        ("loss", "the loss of optimizer step 2 is nan"),
        ("gradient", "holds inf or NaN in optimizer step 2"),
        ("activation", "the first tensor that holds inf or NaN is what decoder.layers.1.mlp.linear_fc1 gives"),
    ],
)
def test_an_update_that_is_not_finite_changes_no_byte(one, two, checkpoint, precision, ranks, how, line):
    world = {1: one, 2: two}[ranks]
    for raised, changed in world.call(trainer.poison_loss, checkpoint, precision, random_sequences(4, seed=3), how):
        assert line in raised
        assert changed == []
