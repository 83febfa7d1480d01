"""What a trainer in high precision gives to a quantised engine: the checkpoint's own bytes, at any tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from support import trainer
from support.models import make_checkpoint, read_weights

from megatron_rl.errors import RunError
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from parallel.formats import MODES
from parallel.layout import Layout

ROLLOUT_MODES = [name for name, mode in MODES.items() if mode.engine and not mode.trainer]


@pytest.mark.parametrize("mode", ROLLOUT_MODES)
@pytest.mark.parametrize("high", ["fp32", "bf16"])
def test_one_rank_and_two_give_the_checkpoints_own_bytes(worlds, checkpoint, mode, high):
    """o_proj and down_proj are cut by columns on two ranks: an INT8 channel's scale is that of the whole row all the same."""
    for world in (worlds(1), worlds(2)):
        tensors = world.call(trainer.loaded, checkpoint, {"mode": mode, "high": high})[0]
        assert_the_checkpoints_own_bytes(tensors, read_weights(checkpoint), mode, high, 2 * 7)  # q k v o gate up down of two layers


def assert_the_checkpoints_own_bytes(
    tensors: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], mode: str, high: str, count: int
) -> None:
    format = PrecisionContract(mode, "pow2", high).engine_format
    quantized = [name for name in weights if format.scale_name(name) in tensors]
    assert len(quantized) == count
    for name in quantized:
        weight = weights[name].to({"fp32": torch.float32, "bf16": torch.bfloat16}[high])  # what the trainer computes with
        blocks = quantize(weight, format)
        held = tensors[name], tensors[format.scale_name(name)]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(held, blocks, strict=True)), name


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2, etp=1), Layout(tp=2, etp=2)], ids=["ep2", "etp2"])
def test_int8_experts_are_the_checkpoints_own_bytes(worlds, tmp_path, layout):
    """Ranks that hold other experts make maxima without each other; those that cut one share them."""
    folder = make_checkpoint(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    precision = {"mode": "int8_rollout", "high": "bf16"}
    tensors = worlds(2).call(trainer.loaded, folder, precision, layout)[0]
    assert_the_checkpoints_own_bytes(tensors, read_weights(folder), **precision, count=4 + 4 * 3)


@pytest.mark.parametrize("mode", ROLLOUT_MODES)
@pytest.mark.parametrize("layer", ["mlp.linear_fc1", "mlp.linear_fc2"])
def test_a_broken_weight_is_named_on_every_rank(worlds, checkpoint, mode, layer):
    """It is broken on rank 0 alone; linear_fc2's columns are cut, so its INT8 ranks share their maxima."""
    name = f"decoder.layers.1.{layer}.weight"
    with pytest.raises(RunError, match=f"{name}: weight holds inf or NaN"):
        worlds(2).call(trainer.poison_rollout_weight, checkpoint, {"mode": mode, "high": "fp32"}, name)
