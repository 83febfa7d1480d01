"""Rotary position embedding of packed rows in one pass, by the position of each token in its sequence.

    out_a = a cos - b sin        out_b = a sin + b cos

for pairs (a, b) of numbers that are half a head apart, or adjacent if `interleaved`. Rounding of `Rotation` matches SGLang's GPU kernel
(`rope.cuh`): cos and sin in FP32, FP32 arithmetic with a fused multiply-add, one rounding. `RoundedRotation`, for CPUs, rounds cos, sin
and both products to the dtype of the row, as CPU engines and Megatron do. Megatron's own reads the length of every sequence from the
device, and computes cos and sin again for queries and keys of each layer.
"""

from typing import Any, NamedTuple, Self

import torch

from megatron_rl.kernels import with_kernel
from megatron_rl.kernels.batch_invariant import apply_elementwise


def rotates_rows(x: torch.Tensor) -> bool:
    """Return whether packed rows are rotated by `Rotation` on the device of x."""
    return x.is_cuda


def make_tables(angles: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of angles, float32 `[positions, pairs]`, multiplied by `scale`, for trainer and engine."""
    return (angles.cos() * scale).contiguous(), (angles.sin() * scale).contiguous()


class Rotation(NamedTuple):
    """The rotation of the tokens of a row, the same for all layers."""

    cos: torch.Tensor  # float32 `[positions, pairs]`, like `sin`
    sin: torch.Tensor
    positions: torch.Tensor  # int64 `[t]`: row of `cos` and `sin` for each token
    interleaved: bool

    @classmethod
    def from_angles(cls, angles: torch.Tensor, positions: torch.Tensor, interleaved: bool, scale: float = 1.0) -> Self:
        """Return the rotation by `angles` float32 `[positions, pairs]`, with cos and sin multiplied by `scale` as in YaRN."""
        return cls(*make_tables(angles, scale), positions, interleaved)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Return x `[t, heads, d]` with the first two numbers per angle of each head rotated, with gradient."""
        return _Rotate.apply(x, self)

    def turn(self, x: torch.Tensor, sign: float) -> torch.Tensor:
        """Return x rotated by `sign` times the angles, without gradient."""
        return rotate(x, self, sign)


class RoundedRotation(NamedTuple):
    """The rotation of the tokens of a row on a CPU, the same for all layers."""

    cos: torch.Tensor  # `[t, 1, pairs]` in the dtype of the row, like `sin`
    sin: torch.Tensor
    interleaved: bool

    @classmethod
    def from_angles(
        cls, angles: torch.Tensor, positions: torch.Tensor, interleaved: bool, scale: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Self:
        """See `Rotation.from_angles`. `dtype` is that of the row."""
        tables = ((apply_elementwise(function, angles) * scale).to(dtype) for function in (torch.cos, torch.sin))
        cos, sin = (table[positions].unsqueeze(1) for table in tables)
        return cls(cos, sin, interleaved)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """See `Rotation.rotate`."""
        return _Rotate.apply(x, self)

    def turn(self, x: torch.Tensor, sign: float) -> torch.Tensor:
        """See `Rotation.turn`."""
        first, second = _split_pairs(self.cos.shape[-1], self.interleaved)
        a, b, sin, result = x[..., first], x[..., second], self.sin * sign, x.clone(memory_format=torch.contiguous_format)
        torch.sub(a * self.cos, b * sin, out=result[..., first])
        torch.add(b * self.cos, a * sin, out=result[..., second])
        return result


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rotation: Rotation | RoundedRotation) -> torch.Tensor:
        ctx.rotation = rotation
        return rotation.turn(x, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rotation.turn(gradient, -1.0), None


def _split_pairs(pairs: int, interleaved: bool) -> tuple[slice, slice]:
    """Return the columns of the first and of the second numbers of `pairs` pairs."""
    return (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (slice(0, pairs), slice(pairs, 2 * pairs))


@with_kernel
def rotate(x: torch.Tensor, rotation: Rotation, sign: float) -> torch.Tensor:
    """Return x rotated by `sign` times the angles, without gradient. float64 holds the product of two float32 exactly, like a fused
    multiply-add."""
    cos, sin = (table[rotation.positions].unsqueeze(1) for table in (rotation.cos, rotation.sin * sign))
    first, second = _split_pairs(cos.shape[-1], rotation.interleaved)
    a, b, result = x[..., first].float(), x[..., second].float(), x.clone(memory_format=torch.contiguous_format)
    result[..., first] = _fuse(a, cos, -(b * sin)).to(x.dtype)
    result[..., second] = _fuse(a, sin, b * cos).to(x.dtype)
    return result


def _fuse(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()
