"""Makes the trainer's model compute with the engine's quantized weights, and with inputs quantized like the engine's.

Attention, norms, kernels and the order of sums stay the trainer's. The difference to the trainer's log-probs is thus due to quantization
alone, and the remaining difference to the engine's log-probs is due to how the engine computes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megatron_rl.kernels.linear import make_backend
from megatron_rl.kernels.linear.base import Backend
from megatron_rl.kernels.linear.reference import DequantizedWeight
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.mcore.base.names import ModelChunks, iter_modules, override
from megatron_rl.mcore.layers.attention.core_attention import CoreAttention
from megatron_rl.mcore.layers.linear.quantized_linear import QuantizedLinear, WeightLayer
from megatron_rl.mcore.layers.linear.row_parallel import gather_sequence
from megatron_rl.mcore.weights.load_weights import find_weight_layers
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import TensorFormat

MatmulFn = Callable[[torch.Tensor, bool], torch.Tensor]
"""(x [..., K], whether to sum in tree order) -> [..., N] in the dtype of x, or float32 partial sums in tree order."""


@contextmanager
def emulate_engine(
    model: ModelChunks, named_tensors: Mapping[str, torch.Tensor], format: TensorFormat, inputs: bool = True
) -> Iterator[int]:
    """Context manager: forward passes multiply with the engine's quantized weights, `collect_named_tensors` in the engine's `format`, and
    with `inputs` quantize the layers' inputs like the engine. Without gradient. Yields the number of replaced layers on this rank, 0 if the
    engine is not quantized. Under tensor parallelism, inputs are quantized in the parts that a trainer rank holds."""
    with ExitStack() as restore, torch.no_grad():
        changed = 0
        for name, layer in find_weight_layers(model).items() if format.quantized else ():
            if (scale := named_tensors.get(format.scale_name(name))) is not None:
                blocks = QuantizedWeight(named_tensors[name], scale)
                if hasattr(layer, "read_values"):  # attention multiplies with these weights; their inputs are not quantized
                    method, replacement = "read_values", DequantizedWeight(blocks, format, layer.row_order).as_dtype
                else:
                    method, replacement = "_forward_impl", partial(_forward, _make_matmul(layer, blocks, format, inputs))
                setattr(layer, method, replacement)
                restore.callback(delattr, layer, method)
                changed += 1
        yield changed


def emulate_cache(model: ModelChunks) -> AbstractContextManager[None]:
    """Return a context manager in which attention reads keys and values as from an E4M3 cache (`precision.kv`)."""
    return override([core for *_, core in iter_modules(model, CoreAttention)], "quantizes_kv", True)


def _forward(multiply: MatmulFn, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    """Replace the `_forward_impl` of a linear layer, including the communication that Megatron expects from it."""
    row_sum, bias = options.get("row_sum"), options.get("bias")
    y = multiply(gather_sequence(input, options["tp_group"]) if options["sequence_parallel"] else input, row_sum is not None)
    if row_sum is not None:
        return row_sum.reduce_whole(y, input.dtype)
    return y if bias is None else y + bias


def _make_matmul(layer: WeightLayer, blocks: QuantizedWeight, format: TensorFormat, inputs: bool) -> MatmulFn:
    """Return the matrix product of a layer."""
    if isinstance(layer, QuantizedLinear):
        backend = make_backend(layer.config.linear_backend, format if inputs else layer.format)
    elif inputs:
        backend = make_backend("emulated", format)
    else:
        return partial(_fp32_matmul, DequantizedWeight(blocks, format, layer.row_order).as_dtype(torch.float32))
    order = None if layer.row_order is None or backend.orders_rows else layer.row_order.argsort().to(blocks.data.device)
    return partial(_quantized_matmul, backend, backend.prepare(blocks, None if order is not None else layer.row_order), order)


def _quantized_matmul(backend: Backend, operand: Any, order: torch.Tensor | None, x: torch.Tensor, by_tree: bool) -> torch.Tensor:
    tokens = backend.quantize(x.reshape(-1, x.shape[-1]), rows=True, columns=False)
    y = (backend.fprop_by_tree if by_tree else backend.fprop)(tokens, operand).unflatten(0, x.shape[:-1])
    return y if order is None else y.index_select(-1, order)


def _fp32_matmul(values: torch.Tensor, x: torch.Tensor, by_tree: bool) -> torch.Tensor:
    """Multiply in FP32, since BF16 may not represent the values."""
    if by_tree:
        return tree.multiply(x.float(), values)
    return (x.float() @ values.t()).to(x.dtype)
