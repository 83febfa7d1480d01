"""Runs operators on tensors without data: torch's FakeTensors decide the result once per set of shapes, and a cache repeats it.

FakeTensorMode takes 100 to 300 microseconds per operator, mostly for symbolic sizes, sparse layouts and constants, which a rehearsal does
not use. A rank of a large model runs half a million operators, of which a few thousand differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_META = torch.device("meta")
_WITHOUT_DEFAULT = ("constant", "real_tensor", "pytype", "dispatch_keys")
_MEMOS = ("nonzero_memo", "item_memo", "unique_memo", "unique_consecutive_memo", "nested_int_memo")
for _name in (*_WITHOUT_DEFAULT, *(f"_{memo}{kind}" for memo in _MEMOS for kind in ("", "_vc", "_epoch"))):
    setattr(FakeTensor, _name, None)  # defaults that FakeTensor's constructor would set on each tensor
_CHANGES_OR_ASKS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,  # changes its input's shape
}
_ALWAYS_KNOWN = {torch.ops.aten.index.Tensor}
"""Operators whose masks, which make shapes depend on values, are resolved before."""
_BY_OFFSET = {torch.ops.aten.as_strided.default}
"""Views whose storage offset is an argument."""
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout}


class _Made(NamedTuple):
    """A tensor returned by an operator."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    source: int | None
    """Index of the input whose storage the tensor shares, or None."""
    offset: int
    """Bytes from the first element of that input to the first element of the tensor."""


@dataclass(slots=True)
class Known:
    """Cached result of an operator for one description of its arguments."""

    sequence: type | None
    """Type of the returned sequence, or None for a single output."""
    outputs: list[_Made | int | None]
    """For each output a new tensor, the index of the input that is returned, or None."""
    moved: int | None = None
    """Bytes that the kernel reads and writes if no arguments share memory, or None if not counted yet."""


_known: dict[Any, Known] = {}
"""Results by operator and description of its arguments."""


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a hashable description of everything in an argument that can affect a result's shape. Append its tensors to `tensors`."""
    kind = type(value)
    if kind is FakeTensor:
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value._fake_device
    if kind is list or kind is tuple or kind is torch.Size:
        return tuple([describe(each, tensors) for each in value])
    if kind not in _PLAIN and isinstance(value, torch.Tensor):
        tensors.append(value)
        return "host", value.shape, value.stride(), value.dtype
    return kind, value


def describe_call(args: tuple, kwargs: dict) -> tuple[Any, list[torch.Tensor]]:
    """Return the description of all arguments and the tensors in them."""
    tensors: list[torch.Tensor] = []
    return (describe(args, tensors), describe(tuple(kwargs.items()), tensors) if kwargs else None), tensors


class ShapeRunner:
    """Runs operators to get the shapes of their results."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False

    def run(self, func: Any, args: tuple, kwargs: dict, description: Any, tensors: list[torch.Tensor]) -> tuple[Any, Known | None]:
        """Return the result of `func` without data, and its cache entry if there is one. Raise the errors that `func` raises for these
        arguments."""
        key = id(func), description, torch.get_default_dtype()
        found = _known.get(key)
        if found is None:
            view = _VIEWS.get(func)
            if view is None or kwargs or (made := view(*args)) is None:
                return self._ask(func, args, kwargs, key, tensors), None
            found = _known[key] = Known(None, [made])
        if found.sequence is None:
            return self._make(found.outputs[0], tensors), found
        return found.sequence([self._make(output, tensors) for output in found.outputs]), found

    def _make(self, output: _Made | int | None, tensors: list[torch.Tensor]) -> Any:
        if type(output) is not _Made:
            return None if output is None else tensors[output]  # type: ignore[index]
        shape, stride, dtype, device, source, offset = output
        if source is None:
            return self.wrap(torch.empty_strided(shape, stride, dtype=dtype, device=_META), device)
        of: Any = tensors[source]
        start, rest = divmod(of.storage_offset() * of.itemsize + offset, dtype.itemsize)
        if rest:
            raise RuntimeError(f"a view as {dtype} does not begin at a multiple of its size")
        return self.wrap(torch.empty(0, dtype=dtype, device=_META).set_(of.untyped_storage(), start, shape, stride), device)

    def wrap(self, meta: torch.Tensor, device: torch.device) -> Any:
        """Return a tensor of `device` with a meta tensor's storage."""
        tensor: Any = torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(tensor)
        tensor._fake_device, tensor.fake_mode = device, self.mode
        return tensor

    def _ask(self, func: Any, args: tuple, kwargs: dict, key: Any, tensors: list[torch.Tensor]) -> Any:
        fakes = args
        if not any(type(tensor) is FakeTensor for tensor in tensors):  # torch would compute host tensors for real
            fakes = tuple(self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in args)
        out = self.mode.dispatch(func, (), fakes, kwargs)
        if func in _ALWAYS_KNOWN or (_CHANGES_OR_ASKS.isdisjoint(func.tags) and func not in _BY_OFFSET):
            outputs = out if isinstance(out, list | tuple) else (out,)
            found = [_find_origin(output, tensors) for output in outputs]
            if "unknown" not in found and describe_call(args, kwargs)[0] == key[1]:
                _known[key] = Known(type(out) if isinstance(out, list | tuple) else None, found)  # type: ignore[arg-type]
        return out


def _slice(tensor: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> _Made | None:
    """Return `tensor[start:end]`, which loops over buffers request at many offsets, or None if torch must decide."""
    if step != 1 or not -tensor.dim() <= dim < tensor.dim():
        return None
    dim %= tensor.dim()
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    shape = torch.Size((*tensor.shape[:dim], max(last - first, 0), *tensor.shape[dim + 1 :]))
    strides = tensor.stride()
    return _Made(shape, strides, tensor.dtype, tensor._fake_device, 0, first * strides[dim] * tensor.itemsize)


_VIEWS: dict[Any, Callable[..., _Made | None]] = {torch.ops.aten.slice.Tensor: _slice}
"""Operators whose results are computed here."""


def _find_origin(output: Any, tensors: list[Any]) -> _Made | int | str | None:
    if output is None:
        return None
    if type(output) is not FakeTensor:
        return "unknown"
    storage: Any = output.untyped_storage()
    for place, tensor in enumerate(tensors):
        if output is tensor:
            return place
    for place, tensor in enumerate(tensors):
        if type(tensor) is FakeTensor and tensor.untyped_storage()._cdata == storage._cdata:
            start: Any = output.storage_offset() * output.itemsize - tensor.storage_offset() * tensor.itemsize
            return _Made(output.shape, output.stride(), output.dtype, output.fake_device, place, start)
    plain = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=_META).untyped_storage().nbytes()
    if output.storage_offset() or storage.nbytes() != plain:
        return "unknown"
    return _Made(output.shape, output.stride(), output.dtype, output.fake_device, None, 0)
