"""The backend `transformer_engine`: its quantizer for activations and cuBLAS's block-scaled GEMM, on the weight blocks of the layers.

Written for Transformer Engine 2.12 to 2.20. Its block-scaled tensors hold uint8 data and FP32 scales:

    weight       rows [N, K], scales [N/128, K/128 padded to 4], N padded to 128; columns: the same bytes and scales, transposed
    activation   rows [T, K], scales [K/128, T padded to 4]; columns [K, T], scales [T/128, K], quantized anew

The quantizer is given the contract's epsilon and scale format explicitly. Transformer Engine's recipe has no argument for either; its
defaults are class attributes that are fixed at import.
"""

from functools import cached_property
from typing import Any, ClassVar

import torch

from megatron_rl.kernels.linear.base import GpuBackend, Operand
from megatron_rl.kernels.linear.gather import PendingOperand, start_gathering_columns, start_gathering_rows
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.kernels.transpose.reference import transpose_bytes
from megatron_rl.precision.contract import AMAX_EPSILON
from megatron_rl.precision.fp8 import append_zeros
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import BLOCK

_TOKENS = 16
"""Tokens are padded with zeros to this multiple: cuBLAS reads the transposed operand of WGrad in rows of T bytes, aligned to 16."""


class TransformerEngineWeight:
    """Block-scaled tensors of Transformer Engine, by rows for FProp and by columns for DGrad. The latter is made at the first backward
    pass."""

    def __init__(self, backend: "TransformerEngineBackend", data: torch.Tensor, scale: torch.Tensor) -> None:
        self._backend, self.scale, self.rows = backend, scale, len(data)
        self.data = append_zeros(data.view(torch.uint8), -2, -self.rows % BLOCK)
        self.fprop = backend.wrap_weight((self.data, pad_scales(scale)), None)

    @cached_property
    def dgrad(self) -> Any:
        return self._backend.wrap_weight(None, (transpose_bytes(self.data), pad_scales(self.scale.t())))


class TransformerEngineBackend(GpuBackend):
    name = "transformer_engine"
    gathered_tokens = _TOKENS
    multiples: ClassVar[dict[str, Any]] = {"row_multiple": _TOKENS, "column_multiple": _TOKENS}

    def prepare(self, blocks: QuantizedWeight, row_order: torch.Tensor | None) -> TransformerEngineWeight:
        self.check_weight(blocks, row_order)
        return TransformerEngineWeight(self, *blocks)

    def wrap_weight(self, rows: Any, columns: Any) -> Any:
        """Return a block-scaled tensor of the pairs of data and scales that are given."""
        return self._tensor(self.weight_quantizer, rows, columns)

    def quantize(self, x: torch.Tensor, *, rows: bool, columns: bool) -> Operand:
        self.check_input(x)
        tokens, width = x.shape
        if not tokens:
            empty = (x.new_empty(0), x.new_empty(0, x.shape[1]))  # only the widths are read
            return Operand(0, empty, empty)
        self._activations.set_usage(rowwise=rows, columnwise=columns)
        padded = append_zeros(append_zeros(x, -2, -tokens % _TOKENS), -1, -width % BLOCK)
        buffers = self._activations(padded.contiguous()).get_metadata()
        row_pair, column_pair = ((buffers[f"{side}_data"], buffers[f"{side}_scale_inv"]) for side in ("rowwise", "columnwise"))
        if columns and width % BLOCK:  # WGrad needs no padding
            column_pair = column_pair[0][:width], column_pair[1][:, :width].contiguous()
        return Operand(tokens, row_pair if rows else (), column_pair if columns else ())

    def arrange(self, pair: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
        return () if pair is None else (pair[0].view(torch.uint8), pair[1].t())

    def start_gather(self, operand: Operand, group: Any) -> PendingOperand:
        of_rows = bool(operand.rows)
        data, scale = operand.rows or operand.columns
        finish = (start_gathering_rows if of_rows else start_gathering_columns)(data, scale, group)

        def wrap() -> Operand:
            pair = finish()
            return Operand(operand.tokens * group.size(), *((pair, ()) if of_rows else ((), pair)))

        return wrap

    def fprop(self, x: Operand, weight: TransformerEngineWeight) -> torch.Tensor:
        product = self._multiply(weight.fprop, x, "TN", weight.data)
        return product[:, : weight.rows].contiguous()

    def fprop_by_tree(self, x: Operand, weight: TransformerEngineWeight) -> torch.Tensor:
        """Multiply with the project's Triton kernel, since cuBLAS chooses its own order."""
        data = weight.data[: weight.rows]
        if not x.tokens:
            return torch.empty(0, len(data), device=data.device)
        rows, scale = x.rows[0][: x.tokens].view(torch.float8_e4m3fn), x.rows[1].t()[: x.tokens]
        return tree.multiply_blocks((rows, scale), (data.view(torch.float8_e4m3fn), weight.scale))

    def dgrad(self, dy: Operand, weight: TransformerEngineWeight) -> torch.Tensor:
        return self._multiply(weight.dgrad, dy, "NN", weight.dgrad.get_metadata()["columnwise_data"])

    def wgrad(self, dy: Operand, x: Operand, into: torch.Tensor | None) -> torch.Tensor:
        if not dy.tokens:
            return into if into is not None else torch.zeros(dy.columns[1].shape[1], x.columns[1].shape[1], device=x.columns[1].device)
        in_place = into is not None and into.dtype == torch.float32 and into.is_contiguous()
        a, b = (self._tensor(self._activations, None, operand.columns) for operand in (x, dy))
        out = into if in_place else None
        dw = _gemm(a, b, layout="NT", out_dtype=torch.float32, use_split_accumulator=True, grad=True, out=out, accumulate=in_place)
        return dw if into is None or in_place else into.add_(dw)

    def _multiply(self, weight: Any, operand: Operand, layout: str, data: torch.Tensor) -> torch.Tensor:
        """Return the product. `data` holds the bytes of the weight that the layout reads, `[features out, features in]`."""
        if not operand.tokens:
            return torch.empty(0, len(data), dtype=torch.bfloat16, device=data.device)
        activation = self._tensor(self._activations, operand.rows, None)
        return _gemm(weight, activation, layout=layout, out_dtype=torch.bfloat16, use_split_accumulator=True)[: operand.tokens]

    def _tensor(self, quantizer: Any, rows: Any, columns: Any) -> Any:
        """Wrap existing bytes and scales in a block-scaled tensor of Transformer Engine."""
        from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

        (rowwise_data, rowwise_scale), (columnwise_data, columnwise_scale) = rows or (None, None), columns or (None, None)
        return Float8BlockwiseQTensorStorage(
            rowwise_data=rowwise_data,
            rowwise_scale_inv=rowwise_scale,
            columnwise_data=columnwise_data,
            columnwise_scale_inv=columnwise_scale,
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
            is_2D_scaled=quantizer.block_scaling_dim == 2,
        )

    @cached_property
    def _activations(self) -> Any:
        return self._quantizer(1)

    @cached_property
    def weight_quantizer(self) -> Any:
        return self._quantizer(2)

    def _quantizer(self, dimensions: int) -> Any:
        import transformer_engine.pytorch  # noqa: F401 - puts transformer_engine_torch, which is not on the path, into sys.modules
        import transformer_engine_torch
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        return Float8BlockQuantizer(
            transformer_engine_torch.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=True,
            amax_epsilon=AMAX_EPSILON,
            force_pow_2_scales=self.scale_format == "pow2",
            block_scaling_dim=dimensions,
        )


def _gemm(a: Any, b: Any, **options: Any) -> torch.Tensor:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    return general_gemm(a, b, **options)[0]


def pad_scales(scale: torch.Tensor) -> torch.Tensor:
    """Pad the columns to a multiple of 4, which the GEMM requires."""
    return append_zeros(scale, -1, -scale.shape[1] % 4).contiguous()
