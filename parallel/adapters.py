"""LoRA adapters: which layers have them, and the two low-rank weights that each adds. As in Megatron-Bridge, an adapter belongs to one of
Megatron's linear layers: the layer's checkpoint tensors share one lora_A [rank, K], and each has its own rows of lora_B [N, rank]. If the
layer's weight is cut by rows, so is lora_B; if by columns, so is lora_A. Each expert has its own adapters."""

from collections.abc import Iterable
from dataclasses import dataclass

from parallel.shards import HFTensor, Region, Weight, make_weight, take_rows

TARGETS = {
    "linear_qkv": "qkv_proj",
    "linear_proj": "o_proj",
    "in_proj_qkvz": "in_proj_qkvz",
    "out_proj": "out_proj",
    "linear_fc1": "gate_up_proj",
    "linear_fc2": "down_proj",
}
"""Maps Megatron's layer names to SGLang's."""
NAMES = ("lora_A", "lora_B")
ENGINE_FILE = "adapters/adapters.safetensors"  # adapters in the folder of an engine without a trainer, under the names of their `HFTensor`s


@dataclass(frozen=True)
class AdapterGeometry:
    """Rank of a model's adapters, and the names of Megatron's layers that have adapters."""

    rank: int
    targets: tuple[str, ...]


def is_adapter(name: str) -> bool:
    """Return whether a parameter name of Megatron or SGLang belongs to an adapter."""
    return name.endswith(NAMES)


def add_adapters(weights: Iterable[Weight], adapters: AdapterGeometry | None) -> tuple[Weight, ...]:
    """Return a layer's weights followed by the weights of its adapters."""
    weights = tuple(weights)
    if adapters is None:
        return weights
    targeted = (weight for weight in weights if weight.megatron.split(".")[-2:] in [[target, "weight"] for target in adapters.targets])
    return weights + tuple(part for weight in targeted for part in _make_adapter(weight, adapters.rank))


def _make_adapter(weight: Weight, rank: int) -> tuple[Weight, Weight]:
    first, by_columns = weight.pieces[0].tensor, weight.cut == "cols"
    megatron, sglang = weight.megatron.removesuffix("weight"), weight.sglang.removesuffix("weight")
    layer = first.name.rsplit(".", 2)[0] + "." + TARGETS[weight.megatron.split(".")[-2]]
    down = HFTensor(f"{layer}.lora_A.weight", rank, first.cols, "lora")
    tensors = dict.fromkeys(piece.tensor for piece in weight.pieces)
    ups = {each: HFTensor(f"{each.name.removesuffix('weight')}lora_B.weight", each.rows, rank, "lora") for each in tensors}

    def take(regions: tuple[Region, ...]) -> tuple[Region, ...]:
        return tuple(take_rows(ups[tensor], rect.row, rect.rows) for tensor, rect, *_ in regions)

    up = weight._replace(
        pieces=take(weight.pieces),
        megatron=megatron + "lora_B",
        sglang=sglang + "lora_B",
        cut="whole" if by_columns else weight.cut,
        stacks=tuple(map(take, weight.stacks)),
    )
    return (
        make_weight(down, megatron + "lora_A", "cols" if by_columns else "whole", sglang + "lora_A", weight.expert),
        up,
    )
