"""The interface of the libraries that compute the quantized products of the trainer's linear layers.

A layer keeps the FP32 master and the blocks made from it; a backend only multiplies. All of them take the bytes of the blocks as they
are, so the engine is given what the trainer computes with, whichever backend runs. `emulated` is the reference. In FP8:

    FProp   y  = Q_1x128(x)    . W^T      rows of x
    DGrad   dx = Q_1x128(dy)   . W        rows of dy, the same blocks
    WGrad   dW = Q_1x128(dy^T) . Q_128x1(x)   columns of both, FP32, added to the gradient buffer where there is one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.errors import RunError
from parallel.formats import BLOCK

if TYPE_CHECKING:
    import torch

    from megatron_rl.precision.quantized_weight import QuantizedWeight
    from parallel.formats import TensorFormat

    Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operand:
    """An activation or gradient [T, K] in the form of one backend, which alone reads the tensors. A layer saves `columns` for the
    backward pass."""

    tokens: int
    """T."""
    rows: Tensors = ()
    """Quantized along K, for FProp and DGrad; empty where not requested."""
    columns: Tensors = ()
    """Quantized along T, for WGrad; empty where not requested."""


class Backend(Protocol):
    """The products of one format. One that only an engine computes with needs no `dgrad` and no `wgrad`."""

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> Any:
        """Return the weight as `fprop` and `dgrad` take it; called once per optimizer step. `row_order` as in
        `mcore.layers.linear.quantized_linear.WeightLayer`."""

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        """Quantize x [T, K] in bf16, or float32 where the backend supports it."""

    def fprop(self, x: Operand, weight: Any) -> torch.Tensor:
        """Return [T, N] in the dtype of the x that was quantized. A row's bits must not depend on other rows, as the engine decodes single
        tokens: on a CPU, multiply by `kernels.batch_invariant.invariant_matmul`."""

    def fprop_by_tree(self, x: Operand, weight: Any) -> torch.Tensor:
        """Return the sum of `fprop` float32 [T, N], not rounded, by the tree over this rank's leaves (`kernels.sums.reference`)."""

    def dgrad(self, dy: Operand, weight: Any) -> torch.Tensor:
        """Return [T, K] in the dtype of the dy that was quantized."""

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        """Return float32 [N, K]; with a gradient buffer `into` [N, K], add to it and return it."""


class SwiGLUBackend(Backend, Protocol):
    """A `Backend` that computes SwiGLU as it quantizes."""

    def quantize_swiglu(self, gate_up: torch.Tensor, gradient: torch.Tensor | None, *, rows: bool, columns: bool) -> Operand:
        """Quantize SwiGLU's result [T, F] for gate_up [T, 2 F]; with the gradient [T, F] of that result, gate_up's [T, 2 F]. The same bits
        as `quantize` of what `kernels.swiglu.reference` returns."""


class NormBackend(Backend, Protocol):
    """A `Backend` that computes the norm of the residual stream as it quantizes."""

    def quantize_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, columns: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Operand]:
        """Return (x + residual [..., h], x without a residual; the statistic float32 [...]; the operand of its norm, rows always). The same
        bits as `quantize` of what `kernels.norm.reference` says."""


class GpuBackend:
    """bf16 in and out, widths in multiples of 128, a weight's rows in their own order; anything else is refused."""

    name: str

    def __init__(self, format: TensorFormat) -> None:
        self.scale_format = format.scale_format

    def check_weight(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> None:
        """Raise RunError where the blocks are cut or reordered."""
        if row_order is not None or any(size % BLOCK for size in blocks.data.shape):
            raise RunError(f"{self.name} cannot multiply with a weight {list(blocks.data.shape)} whose blocks are cut or reordered")

    def check_input(self, x: torch.Tensor) -> None:
        """Raise RunError where x is not bf16."""
        if str(x.dtype) != "torch.bfloat16":
            raise RunError(f"{self.name} gives bf16, and was asked for {x.dtype}")
