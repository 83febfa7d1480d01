"""Layouts: how ranks share a model. Imports without torch.

Ranks are ordered as Megatron orders them by default, tensor parallel fastest: rank = tp + TP * (dp + DP * pp).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions. Example: Layout(tp=2, pp=2) needs a world size that is a multiple of 4."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands. Raises ValueError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside tp({self.tp}) * dp({self.dp}) * pp({self.pp}) = {self.world_size}")
        return Coordinates(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in each dimension of a layout."""

    tp: int = 0
    dp: int = 0
    pp: int = 0
