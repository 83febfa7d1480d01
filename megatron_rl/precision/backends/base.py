"""Who computes the FP8 products of the trainer's linear layers: one interface, three backends.

A layer keeps the FP32 master and the blocks made from it; a backend only multiplies. All of them take the very bytes of the blocks,
so what the engine is given is what the trainer computes with, whichever backend runs. `emulated` is the reference.

    FProp   y  = Q_1x128(x)    . W^T      rows of x
    DGrad   dx = Q_1x128(dy)   . W        rows of dy, the same blocks
    WGrad   dW = Q_1x128(dy^T) . Q_128x1(x)   columns of both, FP32, added to the gradient buffer where there is one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from megatron_rl.precision.fp8 import Fp8Weight

    Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operand:
    """An activation or gradient [T, K] as one backend's products take it. The tensors are the backend's own business; a layer saves
    `columns` for the backward pass."""

    tokens: int
    """T."""
    rows: Tensors = ()
    """Quantised along K, for FProp and DGrad. Empty where it was not asked for."""
    columns: Tensors = ()
    """Quantised along T, for WGrad. Empty where it was not asked for."""


class Fp8Backend(Protocol):
    """The products of one scale format."""

    def prepare(self, blocks: Fp8Weight, row_order: torch.Tensor | None) -> Any:
        """What `fprop` and `dgrad` take as the weight; once per optimizer step. `row_order`: see `mcore.linear`."""

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        """x [T, K] in bf16, or float32 where the backend can."""

    def fprop(self, x: Operand, weight: Any) -> torch.Tensor:
        """[T, N] in the dtype of the x that was quantised."""

    def dgrad(self, dy: Operand, weight: Any) -> torch.Tensor:
        """[T, K] in the dtype of the dy that was quantised."""

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        """float32 [N, K]; with `into`, a gradient buffer [N, K], it is added to that and `into` is returned."""
