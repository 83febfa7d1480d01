"""LoRA: which layers have adapters, and the two low-rank weights that each of them adds to a model's weights.

An adapter belongs to one of Megatron's linear layers, as in Megatron-Bridge: the tensors of the checkpoint that the layer holds share one
lora_A [rank, K], and each has rows of its own in lora_B [N, rank]. A layer cut by rows has lora_B cut like its weight, one cut by columns
has lora_A cut so; the other one is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallel.shards import HFTensor
from parallel.weights import Weight, make_weight

TARGETS = {"linear_qkv": "qkv_proj", "linear_proj": "o_proj", "linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Megatron's layer -> SGLang's."""
ATTENTION = {"linear_qkv", "linear_proj"}
"""The targets that are no MLP's."""
NAMES = ("lora_A", "lora_B")


@dataclass(frozen=True)
class AdapterGeometry:
    """The adapters of a model: their `rank`, and the names of Megatron's layers that have one."""

    rank: int
    targets: tuple[str, ...]


def is_adapter(name: str) -> bool:
    """Return whether a parameter, by either side's name, is an adapter's."""
    return name.endswith(NAMES)


def add_adapters(weights: Iterable[Weight], adapters: AdapterGeometry) -> tuple[Weight, ...]:
    """Return a layer's weights and those of its adapters."""
    weights = tuple(weights)
    targeted = (weight for weight in weights if weight.megatron.split(".")[-2:] in [[target, "weight"] for target in adapters.targets])
    return weights + tuple(part for weight in targeted for part in _make_adapter(weight, adapters.rank))


def _make_adapter(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    tensors, by_columns = [piece.tensor for piece in weight.pieces], weight.cut == "cols"
    megatron, sglang = weight.megatron.removesuffix("weight"), weight.sglang.removesuffix("weight")
    down = HFTensor(f"{sglang}lora_A.weight", rank, tensors[0].cols, "lora")
    up = [HFTensor(f"{tensor.name.removesuffix('weight')}lora_B.weight", tensor.rows, rank, "lora") for tensor in tensors]
    return (
        make_weight(down, megatron + "lora_A", "cols" if by_columns else "whole", sglang + "lora_A"),
        make_weight(up, megatron + "lora_B", "whole" if by_columns else weight.cut, sglang + "lora_B"),
    )
