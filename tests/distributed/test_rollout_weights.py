"""What an engine gets from a trainer that has just loaded a checkpoint: the checkpoint's own blocks, at any tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from support import trainer
from support.models import FP8, make_checkpoint, read_weights

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import RunError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from parallel.formats import MODES
from parallel.layout import Layout

ROLLOUT_MODES = [name for name, mode in MODES.items() if mode.engine and not mode.trainer]
PRECISIONS = [{"mode": mode, "high": high} for mode in ROLLOUT_MODES for high in ("fp32", "bf16")]
PRECISIONS += [FP8, FP8 | {"scale_format": "fp32"}]


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda precision: "-".join(precision.values()))
def test_one_rank_and_two_give_the_checkpoints_own_bytes(worlds, checkpoint, precision):
    """Two ranks split o_proj and down_proj by columns; an INT8 channel's scale still covers the whole row."""
    for world in (worlds(1), worlds(2)):
        tensors = world.call(trainer.loaded, checkpoint, precision)[0]
        assert_the_checkpoints_own_bytes(tensors, read_weights(checkpoint), precision, 2 * 7)  # q k v o gate up down of two layers


def assert_the_checkpoints_own_bytes(tensors: dict, weights: dict, precision: dict, count: int) -> None:
    contract = PrecisionContract.from_config(PrecisionConfig(**precision))
    format, high = (
        contract.engine_format,
        torch.float32 if contract.trainer_format.quantized else getattr(torch, contract.high_format.dtype),
    )
    quantized = {name for name in weights if format.scale_name(name) in tensors}
    assert len(quantized) == count
    for name, weight in weights.items():
        if name in quantized:
            held = tensors[name], tensors[format.scale_name(name)]
            blocks = quantize(weight.to(high), format)  # of the values that the trainer computes with
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(held, blocks, strict=True)), name
        elif precision["high"] == "fp32":
            assert torch.equal(tensors[name], weight), name


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2, etp=1), Layout(tp=2, etp=2)], ids=["ep2", "etp2"])
def test_int8_experts_are_the_checkpoints_own_bytes(worlds, tmp_path, layout):
    """Ranks with different experts compute maxima independently; ranks that split an expert share them."""
    folder = make_checkpoint(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    precision = {"mode": "int8_rollout", "high": "bf16"}
    tensors = worlds(2).call(trainer.loaded, folder, precision, layout)[0]
    assert_the_checkpoints_own_bytes(tensors, read_weights(folder), precision, 4 + 4 * 3)


@pytest.mark.parametrize("mode", ROLLOUT_MODES)
@pytest.mark.parametrize("layer", ["mlp.linear_fc1", "mlp.linear_fc2"])
def test_a_broken_weight_is_named_on_every_rank(worlds, checkpoint, mode, layer):
    """It is broken on rank 0 alone; linear_fc2's columns are split, so its INT8 ranks share their maxima."""
    name = f"decoder.layers.1.{layer}.weight"
    with pytest.raises(RunError, match=f"{name}: weight holds inf or NaN"):
        worlds(2).call(trainer.poison_rollout_weight, checkpoint, {"mode": mode, "high": "fp32"}, name)
