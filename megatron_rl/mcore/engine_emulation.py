"""Makes the trainer's model compute like its engine: with the engine's quantized weights, and inputs quantized as there.

Everything else (attention, norms, kernels, order of sums) stays the trainer's. So the difference to the trainer's own log-probs is due to
quantization alone, and the remaining difference to the engine's is due to how the engine computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from megatron_rl.mcore.layers.fp8_linear import gather_sequence
from megatron_rl.mcore.names import ModelChunks, get_model_chunks, global_name
from megatron_rl.precision import int8
from megatron_rl.precision.backends import make_backend
from megatron_rl.precision.backends.emulated import DequantizedWeight
from megatron_rl.precision.fp8 import Fp8Weight
from megatron_rl.precision.int8 import Int8Weight
from parallel.reshard import scale_name

MatmulFn = Callable[[torch.Tensor], torch.Tensor]
"""x [..., K] -> [..., N] in x's dtype."""


@contextmanager
def emulate_engine(model: ModelChunks, named_tensors: Mapping[str, torch.Tensor], activations: str | None) -> Iterator[int]:
    """Within the context, forward passes multiply with the quantized weights of `named_tensors`
    (`mcore.load_weights.collect_named_tensors`, as given to the engine).

    `activations` (`PrecisionContract.activation_format`): how the layers' inputs are quantized, `pow2` or `fp32` for FP8, `int8`, or
    None for the trainer's way. Yields the number of changed layers on this rank, 0 where the engine is not quantized. No gradient.
    Under tensor parallelism inputs are quantized as a rank of the trainer holds them.
    """
    modules = [
        (chunk, name, layer) for chunk in get_model_chunks(model) for name, layer in chunk.named_modules() if hasattr(layer, "weight")
    ]
    with ExitStack() as restore, torch.no_grad():
        changed = 0
        for chunk, name, layer in modules:
            multiply = _make_matmul(layer, named_tensors, global_name(chunk, f"{name}.weight"), activations)
            if multiply is not None:
                layer._forward_impl = partial(_forward, multiply)
                restore.callback(delattr, layer, "_forward_impl")
                changed += 1
        yield changed


def _forward(
    multiply: MatmulFn, input: torch.Tensor, weight: torch.Tensor, *, sequence_parallel: bool, tp_group: Any, bias: Any = None, **_: Any
) -> torch.Tensor:
    """Replacement of a linear layer's `_forward_impl`, with the communication that Megatron leaves to it."""
    y = multiply(gather_sequence(input, tp_group) if sequence_parallel else input)
    return y if bias is None else y + bias


def _make_matmul(layer: Any, named_tensors: Mapping[str, torch.Tensor], weight: str, activations: str | None) -> MatmulFn | None:
    """Return the product of a layer; None for a layer that the engine does not quantize."""
    if (scale := named_tensors.get(scale_name(weight, "int8"))) is not None:
        return _make_int8_matmul(Int8Weight(named_tensors[weight], scale), activations)
    if (scale := named_tensors.get(scale_name(weight, "fp8"))) is not None:
        blocks, order = Fp8Weight(named_tensors[weight], scale), getattr(layer, "row_order", None)
        if hasattr(layer, "blocks"):
            return _make_fp8_matmul(layer.config.fp8_backend, activations or layer.scale_format, blocks, order)
        if activations:
            return _make_fp8_matmul("emulated", activations, blocks, order)
        return partial(_fp32_matmul, DequantizedWeight(blocks, order).as_dtype(torch.float32))
    return None


def _make_int8_matmul(weight: Int8Weight, activations: str | None) -> MatmulFn:
    numbers = weight.data.float()
    if activations:
        return lambda x: int8.int8_matmul(x, numbers, weight.scale)
    return partial(_fp32_matmul, numbers * weight.scale)


def _make_fp8_matmul(backend_name: str, scale_format: str, blocks: Fp8Weight, row_order: torch.Tensor | None) -> MatmulFn:
    backend = make_backend(backend_name, scale_format)
    operand = backend.prepare(blocks, row_order)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        tokens = backend.quantize(x.reshape(-1, x.shape[-1]), rows=True, columns=False)
        return backend.fprop(tokens, operand).unflatten(0, x.shape[:-1])

    return multiply


def _fp32_matmul(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply in FP32: the values may not be representable in bf16."""
    return (x.float() @ values.t()).to(x.dtype)
