"""A GPU whose tensors have shape, dtype, strides and size, but no data.

Host tensors are real, so everything that the host decides from its own values (micro-batches, lengths, offsets) is decided as in a run.
Operators on device tensors run on torch's FakeTensors, which refuse what CUDA refuses: mixed devices, unsupported dtypes, wrong shapes.

Some device tensors have known values, such as a table of lengths that the host sent, and tensors computed from it. They carry a *value*, a
host tensor on which the same operators run. Queries of unknown values get the answer of a healthy run: sums are finite, no mask selects
anything, and routers spread their tokens evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.rehearsal.recorder import Recorder
from megatron_rl.rehearsal.shapes import Known, ShapeRunner, describe_call

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_CUDA = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_MAX_KNOWN = 1 << 22
"""Largest number of elements of a known value, such as the routes of 8192 tokens among 384 experts. Larger host tensors have no data
either."""
_MAX_ZEROED = 1 << 16
"""Largest number of elements of a tensor whose values are known after `zero_`. The moments of experts, which decide nothing, would fill the
host's memory."""


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the known values of a tensor as a host tensor, or None if they are unknown."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "known_value", None)
    return tensor


def set_value(tensor: Any, value: torch.Tensor | None) -> None:
    """Attach known values to a device tensor, or remove them if `value` is None."""
    if value is not None and value.numel() <= _MAX_KNOWN:
        tensor.known_value = value
    elif hasattr(tensor, "known_value"):
        del tensor.known_value


def plausible_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return the known values of a tensor; if unknown, ones for floating-point tensors and zeros for others."""
    known = value_of(tensor)
    if known is not None:
        return known
    return torch.full(tensor.shape, 1 if tensor.dtype.is_floating_point else 0, dtype=tensor.dtype)


class FakeGpu(TorchDispatchMode):
    """Context manager in which tensors of device `cuda` have no data. `recorder` records everything that happens on the device."""

    def __init__(self, recorder: Recorder, communicate: Callable[[FakeGpu, Any, tuple], Any]) -> None:
        """Args: communicate: answers the operators of `torch.ops.c10d`."""
        super().__init__()
        self.recorder, self._communicate = recorder, communicate
        self.shapes = ShapeRunner()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func.namespace == "c10d":
            return self._communicate(self, func, args)
        kwargs = kwargs or {}
        if func is aten.empty.memory_format and not _is_cuda(kwargs.get("device")):
            return self._make_empty_on_host(func, args, kwargs)
        description, tensors = describe_call(args, kwargs)
        if not any([type(tensor) is FakeTensor for tensor in tensors]) and not _is_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        if func.namespace in _LIBRARIES:
            with self:
                return _LIBRARIES[func.namespace](func._schema.name.partition("::")[2])(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is None:
            out, known = self._run(func, args, kwargs, description, tensors)
        else:
            out, known = handler(self, func, args, kwargs), None
        self.recorder.operator(func, args, kwargs, tensors, out, known)
        return out

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator on shapes and on known values."""
        return self._run(func, args, kwargs, *describe_call(args, kwargs))[0]

    def _run(self, func: Any, args: tuple, kwargs: dict, description: Any, inputs: list[torch.Tensor]) -> tuple[Any, Known | None]:
        out, found = self.shapes.run(func, args, kwargs, description, inputs)
        if func in _NO_VALUES:
            return out, found
        known = not any([type(tensor) is FakeTensor and not hasattr(tensor, "known_value") for tensor in inputs])
        if known or func in _HEALTHY or func._schema.is_mutable:
            self._follow(func, args, kwargs, known, out)
        return out, found

    def _follow(self, func: Any, args: tuple, kwargs: dict, known: bool, out: Any) -> None:
        """Compute the known values of results. `known`: whether the values of all inputs are known."""
        results = [tensor for tensor in _iter_tensors((out,), {}) if type(tensor) is FakeTensor]
        small = all(tensor.numel() <= _MAX_KNOWN for tensor in results)
        if small and known:
            values = func(*_map(args, value_of), **_map({k: ("cpu" if k == "device" else v) for k, v in kwargs.items()}, value_of))
            found = list(_iter_tensors((values,), {}))
            for result, value in zip(results, found, strict=True):
                set_value(result, value)
        elif func in _HEALTHY and (small or func is aten.topk.default):
            for result in results:
                set_value(result, _HEALTHY[func](args, result))
        elif func._schema.is_mutable:
            for result in results:
                set_value(result, None)

    def to_host(self, tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy of a device tensor on the host."""
        if tensor.numel() <= _MAX_KNOWN:
            return plausible_value(tensor).to(dtype or tensor.dtype, copy=True)
        return self.make_host(list(tensor.shape), dtype or tensor.dtype)

    def make_host(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a host tensor without data, for tensors that are too large to be real."""
        tensor = self._empty(tuple(shape), dtype, _HOST)
        self.recorder.hold_on_host(tensor)
        return tensor

    def _make_empty_on_host(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        large = torch.device(kwargs.get("device") or "cpu") == _HOST and prod(args[0]) > _MAX_KNOWN
        return self.make_host(args[0], kwargs.get("dtype") or torch.get_default_dtype()) if large else func(*args, **kwargs)

    def make(self, shape: Any, dtype: torch.dtype, value: torch.Tensor | None = None) -> Any:
        """Return a new device tensor."""
        tensor = self._empty(tuple(shape), dtype, _CUDA)
        set_value(tensor, value)
        return tensor

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        return self.shapes.wrap(torch.empty(shape, dtype=dtype, device="meta"), device)


def _iter_tensors(args: Any, kwargs: dict) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _iter_tensors(value, {})


def _map(values: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(values, torch.Tensor):
        return change(values)
    if isinstance(values, dict):
        return {name: _map(value, change) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_map(value, change) for value in values)
    return torch.device("cpu") if isinstance(values, torch.device) else values


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _on_cuda(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"


# Operators whose result depends on values, or that copy between host and device.


def _read_scalar(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    if _on_cuda(args[0]):
        gpu.recorder.wait("item")
    return plausible_value(args[0]).item()


def _copy_to(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    source = args[0]
    device = kwargs.get("device")
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if device is None or torch.device(device).type == source.device.type:
        return gpu.run(func, args, kwargs)
    if _is_cuda(device):
        return gpu.run(func, args, kwargs)
    if not kwargs.get("non_blocking", False):
        gpu.recorder.wait("copy to host")
    return gpu.to_host(source, kwargs.get("dtype"))


def _copy_into(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    target, source = args[:2]
    if not isinstance(source, torch.Tensor):  # a number
        return gpu.run(aten.fill_.Scalar, (target, source), {})
    if _on_cuda(source) and not _on_cuda(target):
        if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            gpu.recorder.wait("copy to host")
        if not isinstance(target, FakeTensor):
            return target.copy_(plausible_value(source))
    return gpu.run(func, args, kwargs)


def _copy_each(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> None:
    """Copy one by one, because the operator returns no result whose values could be followed."""
    for target, source in zip(*args[:2], strict=True):
        gpu.run(aten.copy_.default, (target, source), {})


def _find_nonzero(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    gpu.recorder.wait("nonzero")
    found = plausible_value(args[0]).nonzero() if value_of(args[0]) is not None else torch.zeros(0, args[0].dim(), dtype=torch.long)
    return gpu.make(found.shape, torch.long, found)


def _resolve_masks(gpu: FakeGpu, indices: Any) -> list[Any]:
    """Replace masks by the indices that they select."""
    resolved: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            if _on_cuda(index):
                gpu.recorder.wait("mask")
                known = value_of(index)
                found = torch.zeros(0, index.dim(), dtype=torch.long) if known is None else known.nonzero()
                resolved += [gpu.make((len(found),), torch.long, places) for places in found.unbind(1)]
            else:
                resolved += index.nonzero().unbind(1)
        else:
            resolved.append(index)
    return resolved


def _index(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    if not _on_cuda(args[0]) and any(_on_cuda(index) for index in args[1]):
        raise RuntimeError(f"indices should be either on {args[0].device} or on the same device as the indexed tensor")
    return gpu.run(func, (args[0], _resolve_masks(gpu, args[1]), *args[2:]), kwargs)


def _put(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    """`x[mask] = 0.0` becomes a masked fill, for which the host does not wait (`canDispatchToMaskedFill` in ATen)."""
    target, indices, value = args[:3]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    (before, mask), *others = [(place, index) for place, index in enumerate(indices) if index is not None]
    one_mask = not others and mask.dtype in (torch.bool, torch.uint8) and _on_cuda(mask)
    if accumulates or not one_mask or value.numel() != 1 or _on_cuda(value):
        return _index(gpu, func, args, kwargs)
    wide = mask[(...,) + (None,) * (target.dim() - mask.dim() - before)]
    fill = aten.masked_fill_.Scalar if func is aten.index_put_.default else aten.masked_fill.Scalar
    return gpu.run(fill, (target, wide, value.item()), {})


def _select_masked(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    gpu.recorder.wait("masked_select")
    source, mask = args
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    known = value_of(mask)
    count = 0 if known is None else int(known.expand(shape).sum())
    values = value_of(source)
    return gpu.make((count,), source.dtype, None if values is None or known is None else values.masked_select(known))


def _repeat(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    size = kwargs.get("output_size")
    if size is None:
        gpu.recorder.wait("repeat_interleave")
    values = value_of(args[0])
    repeated = None if values is None else torch.repeat_interleave(values)
    return gpu.make((len(repeated) if repeated is not None else size or 0,), args[0].dtype, repeated)


def _equal(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    gpu.recorder.wait("equal")
    a, b = map(value_of, args)
    return args[0].shape == args[1].shape if a is None or b is None else torch.equal(a, b)


def _count(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    gpu.recorder.wait("bincount")
    weights = args[1] if len(args) > 1 else None
    least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    values = torch.bincount(plausible_value(args[0]), None if weights is None else plausible_value(weights), least)
    return gpu.make(values.shape, values.dtype, values)


def _make_host(gpu: FakeGpu, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `empty_like` and similar operators without `pin_memory`, which the meta device does not support."""
    return gpu.run(func, args, {name: value for name, value in kwargs.items() if name != "pin_memory"})


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _read_scalar,
    aten._to_copy.default: _copy_to,
    aten.copy_.default: _copy_into,
    aten._foreach_copy_.default: _copy_each,
    aten.nonzero.default: _find_nonzero,
    aten.index.Tensor: _index,
    aten.index_put_.default: _put,
    aten.index_put.default: _put,
    aten._unsafe_index.Tensor: _index,
    aten.masked_select.default: _select_masked,
    aten.repeat_interleave.Tensor: _repeat,
    aten.equal.default: _equal,
    aten.bincount.default: _count,
    aten.record_stream.default: lambda gpu, func, args, kwargs: None,
    aten.empty_like.default: _make_host,
    aten.zeros_like.default: _make_host,
    aten.is_pinned.default: lambda gpu, func, args, kwargs: not _on_cuda(args[0]),
}


def add_handler(operator: Any, handler: Callable[..., Any]) -> None:
    """Register `handler(gpu, operator, args, kwargs)` to run an operator."""
    _HANDLERS[operator] = handler


_LIBRARIES: dict[str, Callable[[str], Callable[..., Any]]] = {}


def add_library(namespace: str, find: Callable[[str], Callable[..., Any]]) -> None:
    """Register custom operators of a namespace, which run the Python function that `find` returns for their name."""
    _LIBRARIES[namespace] = find


def _spread_evenly(args: tuple, result: Any) -> torch.Tensor | None:
    """Choose k of n experts evenly."""
    if result.dtype is not torch.int64 or result.dim() != 2:
        return None
    rows, k = result.shape
    return (torch.arange(rows * k) % args[0].shape[-1]).view(rows, k)


def _count_evenly(args: tuple, result: Any) -> torch.Tensor | None:
    """Add ones [rows, n] to counts [rows, experts] evenly."""
    if result.dtype.is_floating_point or result.dim() != 2:
        return None
    added, places = args[2].shape[1], result.shape[1]
    return plausible_value(args[0]) + (added // places + (torch.arange(places) < added % places)).to(result.dtype)


def _fill(number: Any) -> Callable[[tuple, Any], torch.Tensor]:
    return lambda args, result: torch.full(result.shape, number(args), dtype=result.dtype)


def _fill_small(args: tuple, result: Any) -> torch.Tensor | None:
    return None if result.numel() > _MAX_ZEROED else torch.zeros(result.shape, dtype=result.dtype)


_HEALTHY: dict[Any, Callable[[tuple, Any], torch.Tensor | None]] = {
    aten.all.default: lambda args, result: torch.tensor(True),
    aten.any.default: lambda args, result: torch.tensor(False),
    aten.topk.default: _spread_evenly,
    aten.scatter_add_.default: _count_evenly,
    aten.zero_.default: _fill_small,
    **dict.fromkeys((aten.zeros_like.default, aten.new_zeros.default), _fill(lambda args: 0)),
    **dict.fromkeys((aten.ones_like.default, aten.new_ones.default), _fill(lambda args: 1)),
    **dict.fromkeys((aten.full_like.default, aten.fill_.Scalar), _fill(lambda args: args[1])),
    aten.new_full.default: _fill(lambda args: args[2]),
}
_NO_VALUES = {
    aten.bitwise_xor.Tensor,  # of hashes, which decide nothing
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}
