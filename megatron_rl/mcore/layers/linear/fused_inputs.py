"""What stands in the place of a linear layer's input that is quantized as it is computed, so that it is never written in BF16.

Autograd needs a tensor for its gradient: `activation`, whose one number is expanded to the input's shape and never read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_rl.kernels.linear.base import Operand


class GateUp(NamedTuple):
    """Between two layers for the result of SwiGLU that the second computes as it quantizes."""

    activation: torch.Tensor
    """[..., F] without numbers, which has the result's gradient."""
    gate_up: torch.Tensor
    """[..., 2 F] without gradient."""

    @property
    def dtype(self) -> torch.dtype:
        return self.activation.dtype


class Normed(NamedTuple):
    """Between a norm that quantizes its result and the layer behind it."""

    activation: torch.Tensor
    """[..., h] without numbers, which has the result's gradient."""
    operand: Operand
    """Of this rank's tokens: rows, and in training columns."""

    @property
    def is_cuda(self) -> bool:
        return self.activation.is_cuda


def make_placeholder(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor of a shape that takes the memory of one number."""
    return like.new_empty(1).expand(*shape)
