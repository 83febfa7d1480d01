"""Records what a rehearsal does on one rank's device: memory, host waits, copies, collectives and work, by phase and by line of code."""

import functools
import sys
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from megatron_rl.rehearsal.shapes import Known
from megatron_rl.rehearsal.traffic import count_bytes, count_moved, name_kind

_ALLOCATION = 512
"""Bytes to a multiple of which the caching allocator rounds every allocation."""
_PACKAGES = ("megatron/core/", "megatron_rl/", "parallel/", "rollout_sglang/", "sglang/")
_REHEARSAL = ("/megatron_rl/rehearsal/", "/rollout_sglang/rehearsal/")


_ONCE = "kernels/transpose"  # made in the first pass that needs it, and kept for the others


def find_line() -> str:
    """Return file and line of the innermost frame in the project, Megatron or SGLang."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if name := find_name(frame.f_code):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


@functools.cache
def find_name(code: CodeType) -> str:
    """Return the short file name of code of the project, Megatron or SGLang, or "" for other code."""
    name = code.co_filename
    ours = any(f"/{package}" in name for package in _PACKAGES) and not any(part in name for part in _REHEARSAL)
    return shorten(name) if ours else ""


def find_line_of(error: BaseException) -> str:
    """Return the innermost line of the project, Megatron or SGLang in an error's traceback."""
    frames = [(find_name(frame.f_code), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f"{name}:{line}" for name, line in reversed(frames) if name), "?")


def shorten(name: str) -> str:
    """Return a file name relative to the parent of its package."""
    return next((name[at + 1 :] for package in _PACKAGES if (at := name.rfind("/" + package)) >= 0), name)


@dataclass
class Peak:
    """Peak memory of a phase and the operator that reached it."""

    nbytes: int = 0
    at: str = ""
    line: str = ""
    by_line: dict[str, int] = field(default_factory=dict)
    """Bytes held at the peak, by the line that allocated them."""


@dataclass
class Segment:
    """Work of kernels within passes up to the start of an exchange, or up to the wait for one."""

    moved: Counter = field(default_factory=Counter)
    """Bytes by kind."""
    flops: Counter = field(default_factory=Counter)
    """FLOPs by kind."""
    exchange: int = 0
    """The exchange's number in the phase."""
    sent: tuple[str, str, tuple[int, ...], float] | None = None
    """(group, kind, ranks of the group, bytes that this rank sends) of the exchange that starts, or None for a wait."""


@dataclass
class Phase:
    """What one phase of the job does on a rank. "In passes" means within a micro-batch's forward or backward pass."""

    name: str
    held: int = 0
    """Device memory when the phase begins, in bytes."""
    left: int = 0
    """Device memory when the phase ends, in bytes."""
    peak: Peak = field(default_factory=Peak)
    host_peak: int = 0
    """Peak of the host memory that holds copies of tensors, in bytes."""
    written: int = 0
    """Bytes that this rank writes into a checkpoint."""
    operators: int = 0
    operators_in_passes: int = 0
    moved: Counter = field(default_factory=Counter)
    """(kind, line) -> bytes that kernels read and write."""
    moved_in_passes: Counter = field(default_factory=Counter)
    """Kind -> bytes that kernels read and write in passes."""
    flops: Counter = field(default_factory=Counter)
    """FLOPs of matrix products by kind, as `Gpu.rates` names them."""
    flops_in_passes: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)
    """(kind, line) -> number of times that the host waits for the device."""
    waits_in_passes: Counter = field(default_factory=Counter)
    collectives: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """(kind, group, line) -> [calls, bytes of the whole tensor]."""
    sent: dict[tuple[str, str, tuple[int, ...], bool], float] = field(default_factory=lambda: defaultdict(float))
    """(group, kind, ranks of the group, whether in a pass) -> bytes that this rank sends."""
    timeline: list[Segment] = field(default_factory=list)
    """Segments of the passes in the order in which they are queued on the device."""
    passes: int = 0
    """Forward passes over a micro-batch."""
    choices: int = 0
    """Number of times in these passes that a router chose experts instead of replaying a record."""

    @property
    def traffic(self) -> int:
        return sum(self.moved.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures that trainer and engine ranks report."""
        return {
            "phase": self.name,
            "peak_at": {"operator": self.peak.at, "line": self.peak.line},
            "operators": self.operators,
            "flops": dict(self.flops),
            "host_waits": [
                {"kind": kind, "line": line, "count": count, "in_micro_batches": self.waits_in_passes[kind, line]}
                for (kind, line), count in self.waits.most_common()
            ],
        }


class Recorder:
    """Accumulates the events of one rank's device."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.phase = Phase("import")
        self.now = self._on_host = 0
        self.in_pass = False
        self._allocations: dict[int, tuple[int, str]] = {}
        self._host_storages: set[int] = set()
        self._watched: dict[int, weakref.ref] = {}
        self._by_line: Counter[str] = Counter()
        self._at_peak = False
        self._segment = Segment()

    def begin(self, name: str) -> Phase:
        """End the current phase and begin the next."""
        self.end()
        self.phase = Phase(name, held=self.now, peak=Peak(self.now, "what the phase before left"), host_peak=self._on_host)
        self.phases.append(self.phase)
        self._segment = Segment()
        return self.phase

    def end(self) -> None:
        self.phase.left = self.now
        self._at_peak |= not self.phase.peak.by_line
        self._note_peak()

    def operator(self, func: Any, args: tuple, kwargs: dict, inputs: list[torch.Tensor], out: Any, known: Known | None = None) -> None:
        """Record an operator. `inputs` are the tensors in its arguments, `known` its cached description if there is one."""
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor, func) if tensor.device.type == "cuda" else self.hold_on_host(tensor)
        shares = len(inputs) > 1 and len({tensor.untyped_storage()._cdata for tensor in inputs}) < len(inputs)
        if known is None or known.moved is None or shares:
            moved = count_moved(func, args, kwargs, out)
            if known is not None and not shares:
                known.moved = moved
        else:
            moved = known.moved
        if moved:
            name = func._schema.name
            if name in _PRODUCTS:  # `out=` is not among the positional arguments, and a dtype may follow the factors
                a, b = [value for value in args if isinstance(value, torch.Tensor)][-2:]
                self._move(name, _dtype_kind(a.dtype), moved)
                self._multiply(_dtype_kind(a.dtype), 2 * a.numel() * b.shape[-1])
            else:
                self._move(name, "other", moved)

    def work(self, kind: str, flops: int, *tensors: torch.Tensor, kernel: str = "") -> None:
        """Record a library kernel that reads and writes these tensors."""
        self._multiply(kind, flops)
        self._move(kernel, kind, sum(map(count_bytes, tensors)))

    def _move(self, name: str, dtype: str, nbytes: int) -> None:
        self.phase.operators += 1
        line = find_line()
        kind = name_kind(name, dtype, line)
        self.phase.moved[kind, line] += nbytes
        if self.in_pass and _ONCE not in line:
            self.phase.operators_in_passes += 1
            self.phase.moved_in_passes[kind] += nbytes
            self._segment.moved[kind] += nbytes

    def _multiply(self, kind: str, flops: int) -> None:
        self.phase.flops[kind] += flops
        if self.in_pass:
            self.phase.flops_in_passes[kind] += flops
            self._segment.flops[kind] += flops

    def hold(self, tensor: torch.Tensor, what: Any) -> None:
        """Count a tensor's memory until it is freed. `what` allocates it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._allocations or not storage.nbytes():
            return
        self._watch(storage, self._resize, key, 0)
        self._allocations[key] = 0, find_line()
        self._resize(key, storage.nbytes(), tensor, what)

    def _note_peak(self) -> None:
        """Store the memory by line if the current state is the phase's peak."""
        if self._at_peak:
            self.phase.peak.by_line, self._at_peak = dict(self._by_line), False

    def hold_on_host(self, tensor: torch.Tensor) -> None:
        """Count a host tensor's memory until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._host_storages:
            self._host_storages.add(storage._cdata)
            self._on_host += storage.nbytes()
            self.phase.host_peak = max(self.phase.host_peak, self._on_host)
            self._watch(storage, self._free_on_host, storage._cdata, storage.nbytes())

    def _watch(self, storage: Any, freed: Callable[..., None], *args: Any) -> None:
        """Call `freed(*args)` when a storage is freed. Plain weak references, because `weakref.finalize` is five times slower."""

        def free(reference: weakref.ref) -> None:
            del self._watched[id(reference)]
            freed(*args)

        reference = weakref.ref(storage, free)
        self._watched[id(reference)] = reference

    def _free_on_host(self, key: int, nbytes: int) -> None:
        self._host_storages.discard(key)
        self._on_host -= nbytes

    def resize(self, storage: Any, nbytes: int) -> None:
        """Record a storage's new size."""
        if storage._cdata in self._allocations and nbytes:
            self._resize(storage._cdata, nbytes, None, "resize")
        elif storage._cdata in self._allocations:
            self._resize(storage._cdata, 0)
            self._allocations[storage._cdata] = 0, find_line()  # may grow again

    def _resize(self, key: int, nbytes: int, tensor: Any = None, what: Any = "") -> None:
        before, line = self._allocations[key]
        nbytes = -(-nbytes // _ALLOCATION) * _ALLOCATION
        if nbytes < before:
            self._note_peak()
        if nbytes:
            self._allocations[key] = nbytes, line
        else:
            del self._allocations[key]
        self._by_line[line] += nbytes - before
        self.now += nbytes - before
        if self.now > self.phase.peak.nbytes:
            shape = "" if tensor is None else f" {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            self.phase.peak, self._at_peak = Peak(self.now, f"{what}{shape}", find_line()), True

    def wait(self, kind: str) -> None:
        """Record that the host waits for the device."""
        line = find_line()
        self.phase.waits[kind, line] += 1
        if self.in_pass:
            self.phase.waits_in_passes[kind, line] += 1

    def collective(self, kind: str, group: str, nbytes: int, ranks: Sequence[int] = ()) -> Callable[[], None]:
        """Record a collective, and return a function to call when the device waits for it.

        Args:
            nbytes: size of the whole tensor.
            ranks: ranks of the group; empty for an exchange between hosts.
        """
        entry = self.phase.collectives[kind, group, find_line()]
        entry[0] += 1
        entry[1] += nbytes
        if not ranks:
            return lambda: None
        size = len(ranks)
        share = {"all-reduce": 2 * (size - 1) / size, "send": 1, "receive": 0}.get(kind, (size - 1) / size)
        self.phase.sent[group, kind, tuple(ranks), self.in_pass] += share * nbytes
        if not self.in_pass:
            return lambda: None
        phase, number = self.phase, len(self.phase.timeline)
        self._end_segment(number, (group, kind, tuple(ranks), share * nbytes))
        return lambda: self._end_segment(number) if self.phase is phase else None

    def _end_segment(self, exchange: int, sent: tuple[str, str, tuple[int, ...], float] | None = None) -> None:
        self._segment.exchange, self._segment.sent = exchange, sent
        self.phase.timeline.append(self._segment)
        self._segment = Segment()


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


def _dtype_kind(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "fp32"}.get(dtype, "fp8")
