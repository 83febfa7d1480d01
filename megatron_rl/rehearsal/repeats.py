"""What loading and quantizing do with every weight, by functions whose work depends on shapes alone: it runs once for each set of shapes,
and is counted again for every other weight of these.

A rank of a mixture of experts has thousands of equal weights. What is counted, by line, and what is held at a peak are those that the
function's own run has (`Recorder.observe`), and its results have the same shapes; a fault in it is one of its first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from megatron_rl.mcore.weights import master_spread
from megatron_rl.precision import fp8
from megatron_rl.precision.slices import WeightSlice
from megatron_rl.rehearsal.device import FakeGpu, set_value
from megatron_rl.rehearsal.recorder import Phase
from megatron_rl.rehearsal.shapes import describe


class _Result(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    line: str
    """That allocates it."""


class _Run(NamedTuple):
    work: Phase
    make: Callable[..., Any]
    """Puts results together."""
    results: list[_Result]


def _describe_all(*args: Any) -> tuple[Any, ...]:
    return args


def _describe_places(seed: int, tensor: str, rect: Any, device: Any = "cpu") -> tuple[Any, ...]:
    return rect.rows, rect.cols, str(device)


def _describe_slice(self: WeightSlice, *args: Any) -> tuple[Any, ...]:
    order = None if self.row_order is None else self.row_order.shape  # of which the numbers alone depend on the order
    return self.rows, self.cols, self.start, self.format, order, *args


_REPEATED: tuple[tuple[Any, str, Callable[..., tuple[Any, ...]]], ...] = (
    (master_spread, "hash_places", _describe_places),
    (master_spread, "spread", _describe_all),
    (master_spread, "spread_within_blocks", _describe_all),
    (fp8, "quantize_weight", _describe_all),
    (WeightSlice, "find_maxima", _describe_slice),
    (WeightSlice, "quantize", _describe_slice),
)
"""(owner, function, what its work depends on); each returns new tensors, or writes into its last argument. What a seed, a name or an order
decide are numbers."""


@contextmanager
def run_once_by_shapes(gpu: FakeGpu) -> Iterator[None]:
    """Within the context those functions are repeated where they would do what they did."""
    with ExitStack() as stack:
        for owner, name, describe_arguments in _REPEATED:
            stack.enter_context(mock.patch.object(owner, name, _repeat(gpu, getattr(owner, name), describe_arguments)))
        yield


def _repeat(gpu: FakeGpu, function: Callable[..., Any], describe_arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    runs: dict[Any, _Run | None] = {}

    def call(*args: Any) -> Any:
        tensors: list[torch.Tensor] = []
        key = describe(describe_arguments(*args), tensors)
        if gpu.recorder.in_pass or any(each.device.type != "cuda" or hasattr(each, "known_value") for each in tensors):
            return function(*args)  # numbers that are known may decide
        if key not in runs:
            result, work = gpu.recorder.observe(lambda: function(*args))
            runs[key] = _describe(gpu, result, work, tensors)
            return result
        if (found := runs[key]) is None:
            return function(*args)
        gpu.recorder.repeat(found.work)
        return found.make(*(_make(gpu, each) for each in found.results))

    return call


def _describe(gpu: FakeGpu, result: Any, work: Phase, arguments: list[torch.Tensor]) -> _Run | None:
    """Return None where a result is a view, which cannot be made again by itself."""
    if result is None:
        return _Run(work, lambda: None, [])
    tensors: tuple[torch.Tensor, ...] = result if isinstance(result, tuple) else (result,)
    before, described = {each.untyped_storage()._cdata for each in arguments}, []
    for each in tensors:
        storage = each.untyped_storage()
        if not each.is_contiguous() or storage._cdata in before or storage.nbytes() != each.nbytes:
            return None
        set_value(each, None)
        described.append(_Result(each.shape, each.dtype, gpu.recorder.line_of(each)))
    return _Run(work, type(result) if isinstance(result, tuple) else _take, described)


def _take(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _make(gpu: FakeGpu, result: _Result) -> torch.Tensor:
    tensor: torch.Tensor = gpu.make(result.shape, result.dtype)
    gpu.recorder.hold(tensor, "", result.line)
    return tensor
