"""Megatron's column- and row-parallel linear layers with quantized weights, such as in unified FP8.

A layer holds its blocks as `weight` (bytes) and `scale`, and `operand`, the blocks in the backend's form. The engine receives the same
blocks. The FP32 master is not part of the layer: each data-parallel replica holds a slice (`master`) and quantizes it after every step,
then the replicas gather the bytes (`mcore.optim.quantizing_optimizer`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.linear.base import Backend
from megatron_rl.mcore.base.master_slices import MasterSlice
from megatron_rl.mcore.base.names import ModelChunks, iter_modules, override
from megatron_rl.mcore.base.weight_gradient import hand_over_gradient, take_weight
from megatron_rl.mcore.layers.linear.high_precision import AbsorbedLinear, ReplicatedLinear
from megatron_rl.mcore.layers.linear.quantized_matmul import multiply
from megatron_rl.mcore.layers.linear.row_parallel import RowSum, ScatteredSum, TreeRowParallelLinear, gather_sequence
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import dequantize, quantize
from parallel.formats import TensorFormat


class WeightLayer:
    """A layer with a weight, quantized or not. `mcore.weights.load_weights.set_formats` adds these attributes to Megatron's own layers."""

    weight: torch.nn.Parameter
    format: TensorFormat  # format that the layer computes with
    engine_format: TensorFormat | None = None  # format that the engine computes with, for weights that some mode quantizes; else None
    is_cut_by_columns: bool = False  # whether ranks of `tp_group` hold different columns of the weight's rows
    row_order: torch.Tensor | None = None
    """int64 [N]: row i of the blocks is row `row_order[i]` of `weight`; None if the orders are the same. Needed if a block of the weight's
    own order would mix tensors of the checkpoint (`parallel.megatron_shards.compute_row_order`)."""
    tp_group: Any

    @property
    def blocks(self) -> QuantizedWeight | None:
        """Blocks with rows in quantized order, or None if the layer computes with `weight` itself."""


class QuantizedLinear(WeightLayer):
    """Base class of the quantized layers. `weight` holds the data of the blocks [N, K], with rows in Megatron's order."""

    scale: torch.Tensor  # scales of the blocks, whose rows are in quantized order
    config: TransformerConfig
    cached_operand: Any = None
    quantizes_input: bool = True
    quantization_enabled: bool = True  # false within `disable_quantization`: the forward pass multiplies with the master
    defers_swiglu: bool = False  # whether the next forward pass returns `GateUp` for the following layer; set by `FusedMLP`
    master: MasterSlice | None = None  # slice that this rank's optimizer updates; None without an optimizer
    read_master: Callable[[], torch.Tensor] | None = None
    """Reads the whole master float32 [N, K] from its source, until an optimizer has taken its slice."""
    adopted: bool = False  # whether the blocks are a checkpoint's, byte for byte, and the master is unchanged since

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.params_dtype = getattr(torch, config.linear_format.dtype)  # gives parameters the dtype of blocks
        super().__init__(input_size, output_size, config=config, **kwargs)  # type: ignore[call-arg]
        self.format = config.linear_format

    @property
    def blocks(self) -> QuantizedWeight:
        """A view of live memory, or a copy if rows are reordered."""
        return QuantizedWeight(reorder_rows(self.weight.detach(), self.row_order), self.scale)

    def adopt(self, blocks: QuantizedWeight, read_master: Callable[[], torch.Tensor]) -> None:
        """Use a checkpoint's blocks, with rows in quantized order, byte for byte."""
        self._set_blocks(blocks)
        self.start_master(read_master)
        self.adopted = True

    def quantize(self, master: torch.Tensor) -> None:
        """Quantize a whole master float32 [N, K]. Raise ValueError for inf or NaN."""
        self._set_blocks(quantize(reorder_rows(master, self.row_order), self.format))

    def start_master(self, read_master: Callable[[], torch.Tensor]) -> None:
        """Set the master of the blocks. `read_master` returns float32 [N, K] and is called once there is an optimizer."""
        self.adopted = False
        if self.master is None:
            self.read_master = read_master
        else:
            self.master.fill(read_master())

    def take_slice(self, master: MasterSlice) -> None:
        """Fill the optimizer's slice of the master. The rest of the master is no longer available on this rank."""
        assert self.read_master is not None, "the weight was not loaded"
        self.master = master
        master.fill(self.read_master())
        self.read_master = None

    def gather_master(self) -> torch.Tensor:
        """Return the whole master float32 [N, K] on every replica. Collective over the replicas."""
        if self.master is not None:
            return self.master.gather(self.weight.shape)
        assert self.read_master is not None, "the weight was not loaded"
        return self.read_master()

    def _set_blocks(self, blocks: QuantizedWeight) -> None:
        rows = slice(None) if self.row_order is None else self.row_order
        self.weight.data.view(torch.uint8)[rows] = blocks.data.view(torch.uint8).to(self.weight.device)
        self.set_scale(blocks.scale.to(self.weight.device))

    def set_scale(self, scale: torch.Tensor) -> None:
        """Set the scales of new blocks. The data in `weight` may be written later."""
        self.scale, self.cached_operand = scale, None

    @property
    def can_fuse(self) -> bool:
        """Whether kernels may skip this layer's own pass: none replaces it (`mcore.engine_emulation`), no hook observes it."""
        return self.quantization_enabled and "_forward_impl" not in vars(self) and not self._forward_hooks  # type: ignore[attr-defined]

    @property
    def backend(self) -> Backend:
        """The backend of the matrix products."""
        return make_backend(self.config.linear_backend, self.format)

    @property
    def operand(self) -> Any:
        """The blocks in the backend's form, created on first use: a model that only feeds an engine needs none."""
        if self.cached_operand is None:
            self.cached_operand = self.backend.prepare(self.blocks, None if self.result_order else self.row_order)
        return self.cached_operand

    @cached_property
    def result_order(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(`row_order`, its inverse) on the weight's device, if the backend multiplies rows in the order of blocks, else None."""
        if self.row_order is None or self.backend.orders_rows:
            return None
        order = self.row_order.to(self.weight.device)
        return order, order.argsort()

    def _forward_impl(self, input: Any, weight: torch.Tensor, *_: Any, **options: Any) -> Any:
        """`input` is a tensor, `GateUp` or `Normed`. Return a tensor or `GateUp`."""
        bias = take_weight(options.get("bias"))
        sequence_parallel, group, row_sum = options["sequence_parallel"], options["tp_group"], options.get("row_sum")
        if self.quantization_enabled:
            y = multiply(self, input, weight, options["allreduce_dgrad"], sequence_parallel, group, row_sum)
        else:
            inputs = gather_sequence(input, group) if sequence_parallel else input
            y = F.linear(inputs, self.gather_master().to(inputs.dtype))
            y = y if row_sum is None else row_sum.reduce_whole(y.float(), y.dtype)
        return y if bias is None else y + bias


def reorder_rows(weight: torch.Tensor, row_order: torch.Tensor | None) -> torch.Tensor:
    """Return the weight's rows in quantized order."""
    if row_order is None:
        return weight
    return weight.view(torch.uint8)[row_order].view(weight.dtype) if weight.itemsize == 1 else weight[row_order]


class QuantizedColumnParallelLinear(QuantizedLinear, ColumnParallelLinear):
    """y = x W^T with the rows of W sharded over tensor-parallel ranks; `weight` [N / tp, K]."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        if self.tp_group.size() == 1:
            self.disable_grad_reduce = True  # otherwise Megatron copies the input to all-reduce over one rank, and `Normed` is no tensor
        if self.bias is not None:  # the bias of q, k and v is not quantized
            self.bias.data = self.bias.data.to(config.params_dtype)


class _SubstituteBlockValues(torch.autograd.Function):
    """Replaces a weight by the values of its blocks. Their gradient goes to the weight's gradient buffer."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return values

    @staticmethod
    def backward(ctx: Any, dw: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (weight,) = ctx.saved_tensors
        weight.main_grad.add_(dw)
        return hand_over_gradient(weight), None


class WeightOnlyQuantizedLinear(QuantizedColumnParallelLinear):
    """Multiplies the blocks' values with unquantized inputs: MLA's kv_b, which the engine absorbs into the attention."""

    quantizes_input = False

    def read_values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the blocks' values [N / tp, K], with gradient."""
        if not self.quantization_enabled:
            return self.gather_master().to(dtype)
        return _SubstituteBlockValues.apply(self.weight, dequantize(self.blocks, self.format).to(dtype))

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return ColumnParallelLinear._forward_impl(self, input, self.read_values(input.dtype), *args, **options)


class QuantizedAbsorbedLinear(WeightOnlyQuantizedLinear):
    """The same for an attention that multiplies with the values itself."""

    forward = AbsorbedLinear.forward


class QuantizedRowParallelLinear(QuantizedLinear, TreeRowParallelLinear):
    """y = sum over ranks of x_r W_r^T with the columns of W sharded over tensor-parallel ranks; `weight` [N, K / tp]."""

    def choose_sum(self, dtype: torch.dtype) -> RowSum | None:
        scatters = self.sequence_parallel and self.tp_group.size() > 1 and not self.explicit_expert_comm
        in_library_order = scatters and not self.config.sums_by_tree and self.config.row_parts == 1
        return ScatteredSum(self.tp_group, True) if in_library_order else super().choose_sum(dtype)


class QuantizedReplicatedLinear(QuantizedLinear, ReplicatedLinear):
    """y = x W^T with the whole W on every tensor-parallel rank; `weight` [N, K]."""


def can_fuse_swiglu(first: Any, second: Any) -> bool:
    """Return whether the second layer's quantization can compute the SwiGLU between two linear layers. This requires that there is no bias
    and that the backend supports it."""
    pair = isinstance(first, QuantizedColumnParallelLinear) and isinstance(second, QuantizedRowParallelLinear) and first.bias is None
    return pair and hasattr(second.backend, "quantize_swiglu") and first.can_fuse and second.can_fuse


def find_quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    """Return {name: layer} of every quantized linear layer of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def list_quantized_layers(model: ModelChunks) -> list[QuantizedLinear]:
    """Return the quantized linear layers of all virtual pipeline stages."""
    return [layer for *_, layer in iter_modules(model, QuantizedLinear)]


@contextmanager
def disable_quantization(model: ModelChunks) -> Iterator[None]:
    """Context manager: forward passes multiply with the masters, gathered one at a time. Without gradient."""
    with torch.no_grad(), override(list_quantized_layers(model), "quantization_enabled", False):
        yield
