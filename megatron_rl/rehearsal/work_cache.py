"""Runs functions that load and quantize weights once per set of shapes, and counts their work again for every other weight.

A rank of a mixture of experts has thousands of weights of equal shape. Recorded work and peaks are those of the first run
(`Recorder.observe`), and results have the same shapes. A fault is found in the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from megatron_rl.mcore.weights import master_spread
from megatron_rl.precision import fp8
from megatron_rl.precision.slices import WeightSlice
from megatron_rl.rehearsal.device import FakeGpu, set_value
from megatron_rl.rehearsal.recorder import Phase
from megatron_rl.rehearsal.replacing import replaced
from megatron_rl.rehearsal.shapes import describe


class _Run(NamedTuple):
    work: Phase
    make: Callable[..., Any]
    """Combines the results."""
    results: list[tuple[torch.Size, torch.dtype, str]]
    """(shape, dtype, line that allocates) of each result."""


def _describe_slice(self: WeightSlice, *args: Any) -> tuple[Any, ...]:
    order = None if self.row_order is None else self.row_order.shape  # the order only decides values
    return self.rows, self.cols, self.start, self.format, order, *args


_CACHED: tuple[tuple[Any, str, Callable[..., tuple[Any, ...]]], ...] = (
    (master_spread, "hash_places", lambda seed, tensor, rect, device="cpu": (rect.rows, rect.cols, str(device))),
    (master_spread, "spread", lambda *args: args),
    (master_spread, "spread_within_blocks", lambda *args: args),
    (fp8, "quantize_weight", lambda *args: args),
    (WeightSlice, "find_maxima", _describe_slice),
    (WeightSlice, "quantize", _describe_slice),
)
"""(owner, function, arguments that decide its work). Each returns new tensors, or writes into its last argument."""


@contextmanager
def run_once_per_shape(gpu: FakeGpu) -> Iterator[None]:
    """Context manager in which the functions of `_CACHED` run once for each set of arguments that decide their work."""
    with ExitStack() as stack:
        for owner, name, describe_arguments in _CACHED:
            stack.enter_context(replaced(owner, name, _cache(gpu, getattr(owner, name), describe_arguments)))
        yield


def _cache(gpu: FakeGpu, function: Callable[..., Any], describe_arguments: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    runs: dict[Any, _Run | None] = {}

    def call(*args: Any) -> Any:
        tensors: list[torch.Tensor] = []
        key = describe(describe_arguments(*args), tensors)
        if gpu.recorder.in_pass or any(each.device.type != "cuda" or hasattr(each, "known_value") for each in tensors):
            return function(*args)  # known values may decide the work
        if key not in runs:
            result, work = gpu.recorder.observe(lambda: function(*args))
            runs[key] = _describe_run(gpu, result, work, tensors)
            return result
        if (found := runs[key]) is None:
            return function(*args)
        gpu.recorder.repeat(found.work)
        return found.make(*(_make(gpu, *each) for each in found.results))

    return call


def _describe_run(gpu: FakeGpu, result: Any, work: Phase, arguments: list[torch.Tensor]) -> _Run | None:
    """Return the cache entry of a run, or None if a result is a view, which cannot be made by itself."""
    if result is None:
        return _Run(work, lambda: None, [])
    tensors: tuple[torch.Tensor, ...] = result if isinstance(result, tuple) else (result,)
    before, described = {each.untyped_storage()._cdata for each in arguments}, []
    for each in tensors:
        storage = each.untyped_storage()
        if not each.is_contiguous() or storage._cdata in before or storage.nbytes() != each.nbytes:
            return None
        set_value(each, None)
        described.append((each.shape, each.dtype, gpu.recorder.line_of(each)))
    return _Run(work, type(result) if isinstance(result, tuple) else lambda tensor: tensor, described)


def _make(gpu: FakeGpu, shape: torch.Size, dtype: torch.dtype, line: str) -> torch.Tensor:
    tensor: torch.Tensor = gpu.make(shape, dtype)
    gpu.recorder.hold(tensor, "", line)
    return tensor
