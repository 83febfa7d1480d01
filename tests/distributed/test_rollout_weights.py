"""What a trainer in high precision gives to a quantised engine: the checkpoint's own bytes, at any tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from support import trainer
from support.models import make_checkpoint, read_weights

from megatron_rl.errors import RunError
from megatron_rl.precision.fp8 import quantize_weight
from megatron_rl.precision.int8 import quantize_int8_weight
from parallel.formats import FORMATS
from parallel.layout import Layout


@pytest.mark.parametrize("mode", ["fp8_rollout", "int8_rollout"])
@pytest.mark.parametrize("high", ["fp32", "bf16"])
def test_one_rank_and_two_give_the_checkpoints_own_bytes(worlds, checkpoint, mode, high):
    """o_proj and down_proj are cut by columns on two ranks: an INT8 channel's scale is that of the whole row all the same."""
    for world in (worlds(1), worlds(2)):
        tensors = world.call(trainer.loaded, checkpoint, {"mode": mode, "high": high})[0]
        assert_the_checkpoints_own_bytes(tensors, read_weights(checkpoint), mode, high, 2 * 7)  # q k v o gate up down of two layers


def assert_the_checkpoints_own_bytes(
    tensors: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], mode: str, high: str, count: int
) -> None:
    kind = mode.removesuffix("_rollout")
    quantized = [name for name in weights if FORMATS[kind].scale_name(name) in tensors]
    assert len(quantized) == count
    for name in quantized:
        weight = weights[name].to({"fp32": torch.float32, "bf16": torch.bfloat16}[high])  # what the trainer computes with
        data, scale = quantize_int8_weight(weight) if kind == "int8" else quantize_weight(weight, "pow2")
        assert torch.equal(tensors[name].view(torch.uint8), data.view(torch.uint8)), name
        assert torch.equal(tensors[FORMATS[kind].scale_name(name)], scale), name


@pytest.mark.parametrize("layout", [Layout(tp=2, ep=2, etp=1), Layout(tp=2, etp=2)], ids=["ep2", "etp2"])
def test_int8_experts_are_the_checkpoints_own_bytes(worlds, tmp_path, layout):
    """Ranks that hold other experts make maxima without each other; those that cut one share them."""
    folder = make_checkpoint(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
    precision = {"mode": "int8_rollout", "high": "bf16"}
    tensors = worlds(2).call(trainer.loaded, folder, precision, layout)[0]
    assert_the_checkpoints_own_bytes(tensors, read_weights(folder), **precision, count=4 + 4 * 3)


@pytest.mark.parametrize(
    "mode, layer", [("int8_rollout", "mlp.linear_fc2"), ("int8_rollout", "mlp.linear_fc1"), ("fp8_rollout", "mlp.linear_fc1")]
)
def test_a_broken_weight_is_named_on_every_rank(worlds, checkpoint, mode, layer):
    """It is broken on rank 0 alone; linear_fc2 is the one whose ranks share their maxima."""
    name = f"decoder.layers.1.{layer}.weight"
    with pytest.raises(RunError, match=f"{name}: weight holds inf or NaN"):
        worlds(2).call(trainer.poison_rollout_weight, checkpoint, {"mode": mode, "high": "fp32"}, name)
