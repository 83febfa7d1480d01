"""LoRA: which layers have adapters, and the two low-rank weights that each of them adds to a model's weights.

An adapter belongs to one of Megatron's linear layers, as in Megatron-Bridge: the tensors of the checkpoint that the layer holds share one
lora_A [rank, K], and each has rows of its own in lora_B [N, rank]. A layer cut by rows has lora_B cut like its weight, one cut by columns
has lora_A cut so; the other one is whole on every rank. Each expert has adapters of its own, which SGLang stacks like its weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from parallel.shards import HFTensor, Region, take_rows
from parallel.weights import Weight, make_weight

TARGETS = {"linear_qkv": "qkv_proj", "linear_proj": "o_proj", "linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""Megatron's layer -> SGLang's."""
NAMES = ("lora_A", "lora_B")
ENGINE_FILE = "adapters/adapters.safetensors"
"""In the folder that an engine loads without a trainer: its adapters, by the names of their `HFTensor`s."""


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
    first, by_columns = weight.pieces[0].tensor, weight.cut == "cols"
    megatron, sglang = weight.megatron.removesuffix("weight"), weight.sglang.removesuffix("weight")
    layer = first.name.rsplit(".", 2)[0] + "." + TARGETS[weight.megatron.split(".")[-2]]
    down = HFTensor(f"{layer}.lora_A.weight", rank, first.cols, "lora")
    up = tuple(_take_rows(piece, rank) for piece in weight.pieces)
    return (
        make_weight(down, megatron + "lora_A", "cols" if by_columns else "whole", sglang + "lora_A", weight.expert),
        Weight(up, megatron + "lora_B", sglang + "lora_B", "whole" if by_columns else weight.cut, weight.expert),
    )


def _take_rows(piece: Region, rank: int) -> Region:
    """Return the rows of a tensor's lora_B that belong to a piece of it."""
    tensor, rect, *_ = piece
    return take_rows(HFTensor(f"{tensor.name.removesuffix('weight')}lora_B.weight", tensor.rows, rank, "lora"), rect.row, rect.rows)
