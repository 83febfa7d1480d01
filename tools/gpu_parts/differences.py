"""Two tensors compared: bit by bit, or as numbers; says how many differ, where the first and the worst are, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Difference:
    """`a` against `b`. `count` of `total` elements have other bits; places are indices, None where all are equal."""

    count: int
    total: int
    first: tuple[int, ...] | None = None
    worst: tuple[int, ...] | None = None
    values: tuple[float, float] = (0.0, 0.0)
    """a and b at the worst place."""
    largest: float = 0.0
    """|a - b| there."""
    relative: float = 0.0
    """Norm of a - b over the norm of b; 0 where both are zero, inf where only b is."""

    @property
    def same(self) -> bool:
        return self.count == 0

    def __str__(self) -> str:
        if self.same:
            return f"the same {self.total:,} values, bit by bit"
        a, b = self.values
        share = f"{self.count:,} of {self.total:,} differ ({self.count / self.total:.2%}), first at {list(self.first or ())}"
        return f"{share}, most at {list(self.worst or ())}: {a:.6g} for {b:.6g}; relative L2 {self.relative:.2e}"


def compare(a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Same shape and dtype, any device. -0 and 0 differ, a NaN equals one of the same bits. Raises ValueError for other shapes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{list(a.shape)} {a.dtype} cannot be compared with {list(b.shape)} {b.dtype}")
    b = b.to(a.device)
    differ = _bits(a) != _bits(b)
    count = int(differ.sum())
    if not count:
        return Difference(0, a.numel())
    x, y = a.double(), b.double()
    distance = (x - y).abs().nan_to_num(nan=torch.inf)
    distance = torch.where(differ, distance, -torch.ones_like(distance))  # of elements that differ in a zero's sign only, one is named
    worst = int(distance.argmax())
    norm, off = float(y.norm()), float((x - y).norm())
    return Difference(
        count,
        a.numel(),
        _place(int(differ.flatten().int().argmax()), a.shape),
        _place(worst, a.shape),
        (float(x.flatten()[worst]), float(y.flatten()[worst])),
        float(distance.flatten()[worst]),
        off / norm if norm else (torch.inf if off else 0.0),
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(_INTEGERS[x.element_size()])


def _place(flat: int, shape: torch.Size) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        found.insert(0, index)
    return tuple(found)
