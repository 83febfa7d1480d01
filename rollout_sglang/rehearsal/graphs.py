"""CUDA graphs without a GPU: a capture runs its work once on shapes, and a replay counts the captured work again.

Like CUDA, a capture refuses every call in which the host would wait for the device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from megatron_rl.rehearsal.fake_cuda import recorder

_capturing: list[Graph] = []


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._work: dict[str, Counter] = {}

    def capture_begin(self, *_: Any, **__: Any) -> None:
        if _capturing:
            raise RuntimeError("a CUDA graph is captured within the capture of another one")
        self._before, self._operators = _count(), -recorder().phase.operators
        _capturing.append(self)

    def capture_end(self) -> None:
        _capturing.remove(self)
        self._work = {name: after - self._before[name] for name, after in _count().items()}
        self._operators += recorder().phase.operators

    def replay(self) -> None:
        recorder().phase.operators += self._operators
        recorder().phase.moved.update(self._work["moved"])
        recorder().phase.flops.update(self._work["flops"])
        for key, nbytes in self._work["sent"].items():
            recorder().phase.sent[key] += nbytes

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def reset(self, *_: Any) -> None: ...

    instantiate = enable_debug_mode = debug_dump = reset


def _count() -> dict[str, Counter]:
    return {name: Counter(getattr(recorder().phase, name)) for name in ("moved", "flops", "sent")}


@contextlib.contextmanager
def capture(cuda_graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    """Stands in for torch.cuda.graph."""
    cuda_graph.capture_begin()
    try:
        yield
    finally:
        cuda_graph.capture_end()


def install() -> None:
    """Replace torch's CUDA graphs."""
    cuda: Any = torch.cuda
    cuda.CUDAGraph, cuda.graph, cuda.graph_pool_handle = Graph, capture, lambda: (0, 1)
    cuda.is_current_stream_capturing = is_capturing
    cuda.memory_stats = lambda *_: {
        "reserved_bytes.all.current": recorder().now,
        "reserved_bytes.all.peak": recorder().phase.peak.nbytes,
    }
    cuda.memory_snapshot = lambda *_, **__: []


def is_capturing() -> bool:
    """Return whether a graph is being captured."""
    return bool(_capturing)
