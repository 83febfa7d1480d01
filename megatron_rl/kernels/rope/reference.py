"""Rotary position embedding of packed rows in one pass, by the position of each token in its sequence.

    out_a = a cos - b sin        out_b = a sin + b cos

for pairs (a, b) of numbers that are half a head apart, or adjacent if `interleaved`. Rounding matches SGLang's GPU kernel (`rope.cuh`): cos
and sin in FP32, FP32 arithmetic with a fused multiply-add, one rounding. Megatron's own rotation rounds cos, sin and both products to BF16,
as CPU engines do, and reads the length of every sequence from the device; `mcore` uses it on a CPU.
"""

from typing import Any, NamedTuple, Self

import torch

from megatron_rl.kernels import with_kernel


def rotates_rows(x: torch.Tensor) -> bool:
    """Return whether this module rotates packed rows on the device of x, instead of Megatron."""
    return x.is_cuda


class Rotation(NamedTuple):
    """The rotation of the tokens of a row, the same for all layers."""

    cos: torch.Tensor  # float32 `[positions, pairs]`, like `sin`
    sin: torch.Tensor
    positions: torch.Tensor  # int64 `[t]`: row of `cos` and `sin` for each token
    interleaved: bool

    @classmethod
    def from_angles(cls, angles: torch.Tensor, positions: torch.Tensor, interleaved: bool, scale: float = 1.0) -> Self:
        """Return the rotation by `angles` float32 `[positions, pairs]`, with cos and sin multiplied by `scale` as in YaRN."""
        return cls((angles.cos() * scale).contiguous(), (angles.sin() * scale).contiguous(), positions, interleaved)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Return x `[t, heads, d]` with the first two numbers per angle of each head rotated, with gradient."""
        return _Rotate.apply(x, self)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        ctx.rotation = rotation
        return rotate(x, rotation, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rotate(gradient, ctx.rotation, -1.0), None


@with_kernel
def rotate(x: torch.Tensor, rotation: Rotation, sign: float) -> torch.Tensor:
    """Return x rotated by `sign` times the angles, without gradient. float64 holds the product of two float32 exactly, like a fused
    multiply-add."""
    cos, sin = (table[rotation.positions].unsqueeze(1) for table in (rotation.cos, rotation.sin * sign))
    pairs = cos.shape[-1]
    first = slice(0, 2 * pairs, 2) if rotation.interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if rotation.interleaved else slice(pairs, 2 * pairs)
    a, b, result = x[..., first].float(), x[..., second].float(), x.clone(memory_format=torch.contiguous_format)
    result[..., first] = _fuse(a, cos, -(b * sin)).to(x.dtype)
    result[..., second] = _fuse(a, sin, b * cos).to(x.dtype)
    return result


def _fuse(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()
