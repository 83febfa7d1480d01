"""The precision of a live tensor, read from the tensor itself: its dtype, and for FP8 the shape and the values of its scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.precision.graph.graph import TensorFormat
from parallel.formats import BLOCK, count_blocks

_SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_MANTISSA = 0x7FFFFF


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype; torch's own where there is none."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def unquantized_format(tensor: torch.Tensor) -> TensorFormat:
    """A tensor without scales."""
    return TensorFormat(dtype_name(tensor.dtype))


def block_format(data: torch.Tensor, scale: torch.Tensor) -> TensorFormat:
    """`data` [..., N, K] with `scale`, one per block: the block from the two shapes, pow2 or fp32 from the scales' own values."""
    return TensorFormat(dtype_name(data.dtype), scale_granularity(data.shape, scale.shape), scale_format(scale))


def group_format(group: int | None, scale: str) -> TensorFormat:
    """An input in E4M3 with one scale per `group` elements along the contraction; None: one scale over all."""
    return TensorFormat("e4m3", f"1x{group}" if group else "tensor", scale)


def channel_format(data: torch.Tensor, scale: torch.Tensor) -> TensorFormat:
    """An INT8 weight, [N, K] or as a kernel keeps it [K, N], with one scale per output channel, [N, 1]; experts are stacked, [E, N, K] and
    [E, N, 1]. Raises ValueError for others."""
    stacked = data.shape[:-2] == scale.shape[:-2]
    if min(data.dim(), scale.dim()) < 2 or not stacked or scale.shape[-1] != 1 or scale.shape[-2] not in data.shape[-2:]:
        raise ValueError(f"INT8 weights {list(data.shape)} with scales {list(scale.shape)}: one per output channel is known")
    return TensorFormat(dtype_name(data.dtype), "channel", scale_format(scale))


def token_format(quantises: str) -> TensorFormat:
    """The input of an INT8 layer, which has one float32 scale per token. `quantises`: what the live layer answered."""
    return TensorFormat(quantises, "token", "fp32")


def scale_granularity(data: Sequence[int], scale: Sequence[int]) -> str:
    """ "ROWSxCOLS" of the block that has one scale, or "tensor" for a single one over all. Stacked experts count as one matrix each."""
    if len(data) < 2 or len(scale) < 2:
        return "tensor"
    return "x".join(str(_block(size, count)) for size, count in zip(data[-2:], scale[-2:], strict=True))


def _block(size: int, count: int) -> int:
    """The length of a block where `count` of them cover `size`; the contract's where that fits, for edge blocks may be partial."""
    return BLOCK if count_blocks(size) == count else -(-size // count)


def scale_format(scale: torch.Tensor) -> str:
    """ "pow2" where every scale is a power of two, else "fp32"; the dtype's name for scales that are not float32.

    "invalid" where one is no positive number: SGLang fills scales with the lowest float until a checkpoint's are loaded.
    """
    if scale.dtype != torch.float32:
        return dtype_name(scale.dtype)
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        return "invalid"
    return "fp32" if bool((scale.view(torch.int32) & _MANTISSA).any()) else "pow2"


def common_format(formats: Sequence[TensorFormat]) -> TensorFormat:
    """The format that all share; one that equals none where they differ."""
    kinds = list(dict.fromkeys(formats))
    return kinds[0] if len(kinds) == 1 else TensorFormat("mixed(" + ", ".join(map(str, kinds)) + ")")
