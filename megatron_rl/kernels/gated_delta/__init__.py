"""The gated delta rule, a linear attention with a state of fixed size for each sequence."""

from typing import NamedTuple

import torch

NORM_EPS = 1e-6  # of the norm of queries and keys, in the published models' code


class DeltaHeads(NamedTuple):
    """Heads of one rank and their widths. Each key head serves v / k value heads in a row."""

    k: int
    v: int
    k_dim: int
    v_dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Rows of queries, keys, and values."""
        return self.k * self.k_dim, self.k * self.k_dim, self.v * self.v_dim


class DeltaWeights(NamedTuple):
    """Weights of one rank, without projections and the norm."""

    conv: torch.Tensor  # [c, taps]; rows are those of queries, keys, and values
    a_log: torch.Tensor  # float32 [v]
    dt_bias: torch.Tensor  # float32 [v]
    heads: DeltaHeads
