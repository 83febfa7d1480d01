"""The interface of the backends that compute the quantized products of the trainer's linear layers.

A layer holds the FP32 master and its quantized blocks; a backend only multiplies. All backends use the bytes of the blocks unchanged, so
the engine gets the weights that the trainer computes with. `emulated` is the reference. `precision.contract` has the three products in FP8:
FProp and DGrad read the rows of their `Operand`, WGrad the columns of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_rl.errors import RunError
from parallel.formats import BLOCK

if TYPE_CHECKING:
    import torch

    from megatron_rl.precision.quantized_weight import QuantizedWeight
    from parallel.formats import TensorFormat

    Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operand:
    """An activation or gradient `[T, K]` in a form that only its backend reads. A layer saves `columns` for the backward pass."""

    tokens: int  # number of tokens, T
    rows: Tensors = ()  # quantized along K, for FProp and DGrad; empty if not requested
    columns: Tensors = ()  # quantized along T, for WGrad; empty if not requested


class Backend(Protocol):
    """The products of one format. A format that only the engine computes in needs no `dgrad` and no `wgrad`."""

    orders_rows: bool  # whether `prepare` takes a `row_order`; if not, products have the rows of the blocks in their order

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> Any:
        """Return the weight in the form that `fprop` and `dgrad` take. Called once per optimizer step. `row_order` is that of the layer
        (`mcore.layers.linear.quantized_linear`)."""

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        """Quantize x `[T, K]` in BF16, or float32 if the backend supports it."""

    def fprop(self, x: Operand, weight: Any) -> torch.Tensor:
        """Return `[T, N]` in the dtype of the quantized x. The bits of a row must not depend on other rows, since the engine decodes single
        tokens; on a CPU, multiply with `kernels.batch_invariant.invariant_matmul`."""

    def fprop_by_tree(self, x: Operand, weight: Any) -> torch.Tensor:
        """Return the sum of `fprop` by the tree over this rank's leaves (`kernels.sums.reference`), unrounded: float32 `[T, N]`."""

    def dgrad(self, dy: Operand, weight: Any) -> torch.Tensor:
        """Return `[T, K]` in the dtype of the quantized dy."""

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        """Return float32 `[N, K]`, added to the gradient buffer `into` `[N, K]` if there is one."""


class SlicedBackend(Backend, Protocol):
    """A `Backend` that can be used with `precision.reduction = "ranks"`."""

    def fprop_slices(self, x: Operand, weight: Any, slices: int) -> torch.Tensor:
        """Return `fprop` of each of `slices` equal slices of K, each rounded: `[slices, T, N]`."""


class SwiGLUBackend(Backend, Protocol):
    """A `Backend` that fuses SwiGLU with quantization."""

    def quantize_swiglu(self, gate_up: torch.Tensor, gradient: torch.Tensor | None, *, rows: bool, columns: bool) -> Operand:
        """Quantize SwiGLU's result `[T, F]` for gate_up `[T, 2 F]`, or, given the gradient `[T, F]` of the result, the gradient of gate_up.
        The bits equal those of `kernels.swiglu.reference` followed by `quantize`."""


class NormBackend(Backend, Protocol):
    """A `Backend` that fuses the norm of the residual stream with quantization."""

    def quantize_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, columns: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Operand]:
        """Return (total `[..., h]`, statistic float32 `[...]`, operand of the norm, always with rows); names as in
        `kernels.norm.reference`. The bits equal those of the reference followed by `quantize`."""


ROW_MULTIPLE = 16  # of a weight's rows on a GPU: libraries read rows of bytes that are aligned to 16


class GpuBackend:
    """Base of the GPU backends: BF16 in and out, widths in multiples of 128. Other inputs are refused.

    The last block of a weight's rows may be partial, as in MLA's `kv_a_proj_with_mqa` (512 + 64 rows). DGrad contracts over these rows, so
    both of its operands are padded with zeros to whole blocks, which changes neither blocks nor sums. SwiGLU and norms are fused with
    quantization by the project's Triton kernels.
    """

    name: str
    multiples: ClassVar[dict[str, Any]] = {}  # arguments of `kernels.quantize.triton.allocate`: padding of the tokens
    gathers_bytes = True
    orders_rows = False

    def __init__(self, format: TensorFormat) -> None:
        self.scale_format = format.scale_format

    def check_weight(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> None:
        """Raise RunError if blocks are reordered, or partial except for the last rows."""
        rows, cols = blocks.data.shape
        if row_order is not None or rows % ROW_MULTIPLE or cols % BLOCK:
            raise RunError(f"{self.name} cannot multiply with a weight {list(blocks.data.shape)} whose blocks are cut or reordered")

    def check_input(self, x: torch.Tensor) -> None:
        if str(x.dtype) != "torch.bfloat16":
            raise RunError(f"{self.name} supports only bf16, but was asked for {x.dtype}")

    def arrange(self, pair: tuple[torch.Tensor, torch.Tensor] | None) -> Tensors:
        """Return quantized data and scales of the Triton kernels in the library's layout, or () if they were not requested."""
        return pair or ()

    def quantize_swiglu(self, gate_up: torch.Tensor, gradient: torch.Tensor | None, *, rows: bool, columns: bool) -> Operand:
        from megatron_rl.kernels.swiglu.triton import quantize_swiglu

        self.check_input(gate_up)
        pairs = quantize_swiglu(gate_up, gradient, self.scale_format, rows=rows, columns=columns, **self.multiples)
        return Operand(len(gate_up), *map(self.arrange, pairs))

    def quantize_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, *, columns: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Operand]:
        from megatron_rl.kernels.norm.triton import quantize_norm

        self.check_input(x)
        total, statistic, *pairs = quantize_norm(x, residual, weight, eps, self.scale_format, columns=columns, **self.multiples)
        return total, statistic, Operand(statistic.numel(), *map(self.arrange, pairs))
