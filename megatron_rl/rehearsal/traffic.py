"""Bytes that an operator reads and writes on a GPU, counting each tensor once at its real size."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_ASK_OR_ALLOCATE = (
    "prim::device", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_unsafe_view", "aten::detach_", "aten::set_", "aten::resize_", "aten::record_stream", "aten::is_pinned", "aten::is_same_size",
)  # fmt: skip
_WRITE_ALONE = (
    "aten::zero_", "aten::fill_", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros", "aten::new_ones",
    "aten::new_full", "aten::_foreach_zero_",
)  # fmt: skip
_COPY_INTO = ("aten::copy_", "aten::_foreach_copy_")
_READ_ROWS = ("aten::embedding", "aten::index", "aten::_unsafe_index", "aten::gather", "aten::index_select", "aten::take")
_WRITE_ROWS = (
    "aten::index_put", "aten::_unsafe_index_put", "aten::_index_put_impl", "aten::scatter", "aten::scatter_add", "aten::index_add",
    "aten::index_copy",
)  # fmt: skip


def count_moved(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Return the bytes of device memory that an operator's kernel reads and writes.

    Inputs are read once and outputs are written once; tensors changed in place are both. Views, queries and allocations move nothing. If
    rows of a table are selected or filled, only these rows and the indices count. Copies and fills do not read the overwritten tensor, and
    no operator reads `out`.
    """
    name = func._schema.name
    if func.is_view or name in _ASK_OR_ALLOCATE or name.startswith("torch_attn::"):  # counted by the shape function of the kernel
        return 0
    inputs = list(_iter_on_device((*args, *(value for argument, value in kwargs.items() if argument != "out"))))
    outputs = list(_iter_on_device((out,)))
    changed = [
        tensor
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _iter_on_device((value,))
    ]
    changed += list(_iter_on_device(value for argument, value in kwargs.items() if argument == "out"))
    if name in _WRITE_ALONE:
        return _sum(changed or outputs)
    if name in _COPY_INTO:
        return _sum(changed) + _sum(_iter_on_device(args[1:2]))
    if name in _READ_ROWS:
        return 2 * _sum(outputs) + _sum(_iter_on_device(args[1:]))
    if name == "aten::embedding_dense_backward":  # zeros, then sums of rows
        return _sum(outputs) + 3 * _sum(inputs[:1]) + _sum(inputs[1:])
    if name.rstrip("_") in _WRITE_ROWS:
        table, rest = inputs[:1], inputs[1:]
        whole = 0 if changed else 2 * _sum(table)  # copied first
        adds = "add" in name or (len(args) > 3 and args[3] is True)
        return whole + _sum(rest) + (2 if adds else 1) * _sum(rest[-1:])
    return _sum(inputs) + _sum(changed or outputs)


def count_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements. Expanded dimensions count once."""
    count = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def _sum(tensors: Iterable[torch.Tensor]) -> int:
    distinct = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in tensors}
    return sum(map(count_bytes, distinct.values()))


def _iter_on_device(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu":
                yield value
        elif isinstance(value, list | tuple):
            yield from _iter_on_device(value)


@functools.cache
def name_kind(operator: str, dtype: str, line: str) -> str:
    """Return the kind of an operator's work, from the kind of a product or from the line of code that calls the operator."""
    if operator == "norm":
        return "norms"
    if operator in _QUANTIZING_KERNELS:
        return "quantization"
    if dtype in ("fp8", "fp8 WGrad", "bf16", "fp32", "attention"):
        return dtype if dtype == "attention" else f"{dtype} products"
    return next((kind for part, kind in _BY_LINE if part in line), "other element-wise")


_BY_LINE = (
    ("logprobs", "log-probs"), ("vocabulary", "log-probs"), ("digest", "sync"), ("fused_bias_dropout", "residual add"),
    ("cross_entropy", "log-probs"), ("policy_loss", "log-probs"),
    ("quantizing_optimizer", "optimizer"), ("mcore/base/master_slices", "optimizer"),
    ("optimizer", "optimizer"), ("clip_grads", "optimizer"),
    ("core/distributed/", "gradient buffers"), ("gradient", "gradient buffers"), ("buckets", "gradient buffers"),
    ("parallel/transport", "sync"), ("hash", "sync"),
    ("tensor_parallel/mappings", "communication's copies"), ("kernels/linear/gather", "communication's copies"),
    ("token_dispatcher", "communication's copies"), ("row_sums", "communication's copies"), ("p2p", "communication's copies"),
    ("quant", "quantization"), ("kernels/linear", "quantization"), ("kernels/slices", "quantization"),
    ("kernels/transpose", "quantization"), ("kernels/experts/deep_gemm", "quantization"),
    ("kernels/heads/", "queries and keys"),
    ("norm", "norms"), ("rope", "rope"), ("rotary", "rope"), ("swiglu", "SwiGLU"), ("activation", "SwiGLU"),
    ("attention", "attention"), ("residual", "residual add"), ("transformer_layer", "residual add"),
)  # fmt: skip
"""Part of a line's file -> kind. The first match counts."""
_QUANTIZING_KERNELS = (
    *("normalize_row", "quantize_normed_tile", "quantize_swiglu_tile"),
    *("quantize_weighed_tile", "pack_token", "spread_packed_row"),
)
"""Triton kernels that quantize, in files with kernels that do not."""
