"""Reads the precision of a live tensor from the tensor itself: its dtype, and for FP8 the shape and values of its scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.precision.graph.graph import TensorFormat
from parallel.formats import BLOCK, count_blocks

_SHORT_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
_MANTISSA = 0x7FFFFF


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, torch's own where there is none."""
    return _SHORT_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def unquantized_format(tensor: torch.Tensor) -> TensorFormat:
    """Return the format of a tensor without scales."""
    return TensorFormat(dtype_name(tensor.dtype))


def block_format(data: torch.Tensor, scale: torch.Tensor) -> TensorFormat:
    """Return the format of `data` [..., N, K] with one scale per block: the block from the two shapes, pow2 or fp32 from the scales."""
    return TensorFormat(dtype_name(data.dtype), scale_granularity(data.shape, scale.shape), scale_format(scale))


def group_format(group: int | None, scale: str) -> TensorFormat:
    """Return the format of an E4M3 input with one scale per `group` elements along the contraction, or one in all for None."""
    return TensorFormat("e4m3", f"1x{group}" if group else "tensor", scale)


def channel_format(data: torch.Tensor, scale: torch.Tensor) -> TensorFormat:
    """Return the format of an INT8 weight, [N, K] or in a kernel's order [K, N], with one scale per output channel, [N, 1]; experts are
    stacked, [E, N, K] and [E, N, 1]. Raise ValueError for others."""
    stacked = data.shape[:-2] == scale.shape[:-2]
    if min(data.dim(), scale.dim()) < 2 or not stacked or scale.shape[-1] != 1 or scale.shape[-2] not in data.shape[-2:]:
        raise ValueError(f"INT8 weights {list(data.shape)} with scales {list(scale.shape)}: one per output channel is known")
    return TensorFormat(dtype_name(data.dtype), "channel", scale_format(scale))


def token_format(dtype: str) -> TensorFormat:
    """Return the format of an INT8 layer's input, with one float32 scale per token; `dtype` as the live layer reports it."""
    return TensorFormat(dtype, "token", "fp32")


def scale_granularity(data: Sequence[int], scale: Sequence[int]) -> str:
    """Return "ROWSxCOLS" of the block that has one scale, or "tensor" for a single scale. Stacked experts count as one matrix each."""
    if len(data) < 2 or len(scale) < 2:
        return "tensor"
    return "x".join(str(_block_length(size, count)) for size, count in zip(data[-2:], scale[-2:], strict=True))


def _block_length(size: int, count: int) -> int:
    """Return the length of a block where `count` of them cover `size`: the contract's where that fits, as edge blocks may be partial."""
    return BLOCK if count_blocks(size) == count else -(-size // count)


def scale_format(scale: torch.Tensor) -> str:
    """Return "pow2" where every scale is a power of two, else "fp32"; the dtype's name for scales that are not float32.

    Return "invalid" where one is no positive number: SGLang fills scales with the lowest float until a checkpoint's are loaded.
    """
    if scale.dtype != torch.float32:
        return dtype_name(scale.dtype)
    if not bool(((scale > 0) & torch.isfinite(scale)).all()):
        return "invalid"
    return "fp32" if bool((scale.view(torch.int32) & _MANTISSA).any()) else "pow2"


def common_format(formats: Sequence[TensorFormat]) -> TensorFormat:
    """Return the format that all share, or one that equals none where they differ."""
    distinct = list(dict.fromkeys(formats))
    return distinct[0] if len(distinct) == 1 else TensorFormat("mixed(" + ", ".join(map(str, distinct)) + ")")
