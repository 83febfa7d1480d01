"""Rotary positions of packed rows in one pass, by each token's position in its sequence.

    out_a = a cos - b sin        out_b = a sin + b cos

for pairs (a, b) of numbers half a head apart, or next to each other where `interleaved`. As SGLang's kernel on a GPU (`rope.cuh`): cos and
sin in FP32, FP32 arithmetic with the second product fused into the sum, one rounding. Megatron's own rotation rounds cos, sin and both
products to BF16, as engines on a CPU do, and asks the device for every sequence's length; `mcore` takes it on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def rotates_rows(x: torch.Tensor) -> bool:
    """Return whether packed rows on this device are rotated here, not by Megatron."""
    return x.is_cuda


@dataclass(frozen=True)
class Rotation:
    """What a row's tokens are rotated by: the same for all layers."""

    cos: torch.Tensor
    """float32 [positions, pairs]."""
    sin: torch.Tensor
    positions: torch.Tensor
    """int64 [t]: each token's row of both."""
    interleaved: bool

    @classmethod
    def from_angles(cls, angles: torch.Tensor, positions: torch.Tensor, interleaved: bool, scale: float = 1.0) -> Rotation:
        """`angles` float32 [positions, pairs]; `scale` multiplies cos and sin, as YaRN does."""
        return cls((angles.cos() * scale).contiguous(), (angles.sin() * scale).contiguous(), positions, interleaved)

    def rotate(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return x [t, heads, d] with the numbers of each head from `start` on rotated, as many as there are angles for, with gradient."""
        return _Rotate.apply(x, self, start)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rotation: Rotation, start: int) -> torch.Tensor:
        ctx.rotation, ctx.start = rotation, start
        return _rotate(x, rotation, start, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate(gradient, ctx.rotation, ctx.start, -1.0), None, None


def _rotate(x: torch.Tensor, rotation: Rotation, start: int, sign: float) -> torch.Tensor:
    if x.is_cuda:
        from megatron_rl.kernels.rope.triton import rotate

        return rotate(x, rotation.cos, rotation.sin, rotation.positions, start, sign, rotation.interleaved)
    return rotate_reference(x, rotation, start, sign)


def rotate_reference(x: torch.Tensor, rotation: Rotation, start: int, sign: float) -> torch.Tensor:
    """Return what the kernel does, on any device. float64 holds a product of two float32 exactly, as a fused multiply-add does."""
    cos, sin = (table[rotation.positions].unsqueeze(1) for table in (rotation.cos, rotation.sin * sign))
    end, step = start + 2 * cos.shape[-1], 2 if rotation.interleaved else 1
    first = slice(start, end, 2) if rotation.interleaved else slice(start, start + cos.shape[-1])
    second = slice(first.start + (1 if rotation.interleaved else cos.shape[-1]), end, step)
    a, b, result = x[..., first].float(), x[..., second].float(), x.clone(memory_format=torch.contiguous_format)
    result[..., first] = _fuse(a, cos, -(b * sin)).to(x.dtype)
    result[..., second] = _fuse(a, sin, b * cos).to(x.dtype)
    return result


def _fuse(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()
