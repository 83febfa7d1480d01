"""What a rehearsal observes: memory, waits of the host, copies, collectives and work, by phase and by line of code."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from megatron_rl.rehearsal.shapes import Known
from megatron_rl.rehearsal.traffic import count_bytes, count_moved, name_kind

_ROUND = 512
"""Bytes that the caching allocator rounds every allocation up to."""


def find_line() -> str:
    """Return file and line of the innermost frame that is the project's, Megatron's or SGLang's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = find_name(frame.f_code)
        if name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


@functools.cache
def find_name(code: CodeType) -> str:
    """Return the short name of the file of our code; "" of other code."""
    return shorten(code.co_filename) if _is_ours(code.co_filename) else ""


def find_line_of(error: BaseException) -> str:
    """Return the innermost line of the project's, Megatron's or SGLang's code in an error's traceback."""
    line, trace = "?", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if _is_ours(name):
            line = f"{shorten(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


_PACKAGES = ("megatron/core/", "megatron_rl/", "parallel/", "rollout_sglang/", "sglang/")
_REHEARSAL = ("/megatron_rl/rehearsal/", "/rollout_sglang/rehears")


def _is_ours(name: str) -> bool:
    return any(f"/{package}" in name for package in _PACKAGES) and not any(part in name for part in _REHEARSAL)


def shorten(name: str) -> str:
    """Return a file's name from its package on."""
    for package in _PACKAGES:
        at = name.rfind("/" + package)
        if at >= 0:
            return name[at + 1 :]
    return name


@dataclass
class Peak:
    """The most bytes of a phase, and the operator that reached it."""

    nbytes: int = 0
    at: str = ""
    line: str = ""
    by_line: dict[str, int] = field(default_factory=dict)
    """Bytes that were held then, by the line that allocated them."""


@dataclass
class Stretch:
    """What kernels do within passes up to an exchange that begins, or is waited for."""

    moved: Counter = field(default_factory=Counter)
    """Kind -> bytes."""
    flops: Counter = field(default_factory=Counter)
    """By kind of product."""
    exchange: int = 0
    """Its number in the phase."""
    sent: tuple[str, int, int, float] | None = None
    """Of one that begins: (group, its first rank, its last rank, bytes that this rank sends); None of one that is waited for."""


@dataclass
class Phase:
    """What one phase of the job did on a rank."""

    name: str
    held: int = 0
    """Bytes on the device when it began."""
    left: int = 0
    """Bytes when it ended."""
    peak: Peak = field(default_factory=Peak)
    host_peak: int = 0
    """The most bytes of host memory that held copies of tensors at a time."""
    written: int = 0
    """Bytes that this rank writes into a checkpoint."""
    operators: int = 0
    operators_in_passes: int = 0
    moved: Counter = field(default_factory=Counter)
    """(kind, line) -> bytes that kernels read and write."""
    moved_in_passes: Counter = field(default_factory=Counter)
    """Kind -> those of them within a micro-batch's forward or backward pass."""
    flops: Counter = field(default_factory=Counter)
    """By kind of product: `fp8`, `bf16`, `fp32`."""
    flops_in_passes: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)
    """(kind, line) -> how often the host waits for the device."""
    waits_in_passes: Counter = field(default_factory=Counter)
    """Those of them within a micro-batch's forward or backward pass."""
    copies: Counter = field(default_factory=Counter)
    """(direction, line) -> bytes."""
    collectives: dict[tuple[str, str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """(kind, group, line) -> [calls, bytes of the whole tensor]."""
    sent: dict[tuple[str, int, int, bool], float] = field(default_factory=lambda: defaultdict(float))
    """(group, its first rank, its last rank, whether within a pass) -> bytes that this rank sends."""
    timeline: list[Stretch] = field(default_factory=list)
    """Of the passes, in the order in which they are queued on the device."""
    passes: int = 0
    """Forward passes over a micro-batch."""
    choices: int = 0
    """How often a router chose experts in them, and replayed no record."""

    @property
    def traffic(self) -> int:
        """Bytes that kernels read and write."""
        return sum(self.moved.values())


class Recorder:
    """Adds up what happens on one rank's device."""

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
        self._stretch = Stretch()

    def begin(self, name: str) -> Phase:
        """End the phase under way and begin the next."""
        self.end()
        self.phase = Phase(name, held=self.now, peak=Peak(self.now, "what the phase before left"), host_peak=self._on_host)
        self.phases.append(self.phase)
        self._stretch = Stretch()
        return self.phase

    def end(self) -> None:
        self.phase.left = self.now
        self._at_peak |= not self.phase.peak.by_line
        self._note_peak()

    def operator(self, func: Any, args: tuple, kwargs: dict, inputs: list[torch.Tensor], out: Any, known: Known | None = None) -> None:
        """An operator ran; `inputs` are the tensors in its arguments, `known` what is known of it."""
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.hold(tensor, func) if tensor.device.type == "cuda" else self.hold_on_host(tensor)
        if known is None or (len(inputs) > 1 and _share_memory(inputs)):
            moved = count_moved(func, args, kwargs, out)
        elif known.moved is None:
            moved = known.moved = count_moved(func, args, kwargs, out)
        else:
            moved = known.moved
        if moved:
            name = func._schema.name
            self._move(name, _kind(_factors(args)[0].dtype) if name in _PRODUCTS else "other", moved)
            self._count_flops(func, args)

    def _move(self, name: str, dtype: str, nbytes: int) -> None:
        self.phase.operators += 1
        line = find_line()
        kind = name_kind(name, dtype, line)
        self.phase.moved[kind, line] += nbytes
        if self.in_pass:
            self.phase.operators_in_passes += 1
            self.phase.moved_in_passes[kind] += nbytes
            self._stretch.moved[kind] += nbytes

    def hold(self, tensor: torch.Tensor, what: Any, line: str = "") -> bool:
        """Count a tensor's memory until it is freed; return whether it is new. `line`: that allocates it, by default the one that runs."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._allocations or not storage.nbytes():
            return False
        self._watch(storage, self._resize, key, 0)
        self._allocations[key] = 0, line or find_line()
        self._resize(key, storage.nbytes(), tensor, what)
        return True

    def line_of(self, tensor: torch.Tensor) -> str:
        """Return the line that allocated a tensor's memory."""
        return self._allocations[tensor.untyped_storage()._cdata][1]

    def observe(self, run: Callable[[], Any]) -> tuple[Any, Phase]:
        """Run something outside of passes and without collectives. Return its result, and what it did for `repeat`; its peaks are what it
        added to what was held."""
        self._note_peak()
        whole, held, by_line, on_host = self.phase, self.now, self._by_line.copy(), self._on_host
        self.phase = own = Phase(whole.name, held=held, peak=Peak(held), host_peak=on_host)
        try:
            result = run()
        finally:
            self._note_peak()
            self.phase = whole
        assert not self.in_pass and not own.collectives, "what runs in passes, or talks to other ranks, has an order"
        own.peak.nbytes, own.host_peak = own.peak.nbytes - held, own.host_peak - on_host
        own.peak.by_line = {line: nbytes - by_line[line] for line, nbytes in own.peak.by_line.items() if nbytes != by_line[line]}
        self._add(own, held, by_line, on_host)
        return result, own

    def repeat(self, work: Phase) -> None:
        """The same ran once more; its results are still to be held."""
        self._note_peak()
        self._add(work, self.now, self._by_line, self._on_host)

    def _add(self, work: Phase, held: int, by_line: Counter[str], on_host: int) -> None:
        phase = self.phase
        phase.operators += work.operators
        for name in ("moved", "flops", "waits", "copies"):
            getattr(phase, name).update(getattr(work, name))
        phase.host_peak = max(phase.host_peak, on_host + work.host_peak)
        if held + work.peak.nbytes > phase.peak.nbytes:
            lines = by_line.copy()
            lines.update(work.peak.by_line)
            phase.peak = Peak(held + work.peak.nbytes, work.peak.at, work.peak.line, dict(lines))

    def _note_peak(self) -> None:
        """Note what is held, if that is the phase's peak."""
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
        """Call `freed(*args)` when a storage is freed. A weak reference of its own: `weakref.finalize` takes five times as long."""

        def free(reference: weakref.ref) -> None:
            del self._watched[id(reference)]
            freed(*args)

        reference = weakref.ref(storage, free)
        self._watched[id(reference)] = reference

    def _free_on_host(self, key: int, nbytes: int) -> None:
        self._host_storages.discard(key)
        self._on_host -= nbytes

    def resize(self, storage: Any, nbytes: int) -> None:
        """A storage has another size now."""
        if storage._cdata in self._allocations and nbytes:
            self._resize(storage._cdata, nbytes, None, "resize")
        elif storage._cdata in self._allocations:
            self._resize(storage._cdata, 0)
            self._allocations[storage._cdata] = 0, find_line()  # may grow again

    def _resize(self, key: int, nbytes: int, tensor: Any = None, what: Any = "") -> None:
        before, line = self._allocations[key]
        nbytes = -(-nbytes // _ROUND) * _ROUND
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

    def work(self, kind: str, flops: int, *tensors: torch.Tensor, kernel: str = "") -> None:
        """A kernel of a library ran that reads and writes these tensors."""
        self._calculate(kind, flops)
        self._move(kernel, kind, sum(map(count_bytes, tensors)))

    def _count_flops(self, func: Any, args: tuple) -> None:
        if func._schema.name in _PRODUCTS:
            a, b = _factors(args)
            self._calculate(_kind(a.dtype), 2 * a.numel() * b.shape[-1])

    def _calculate(self, kind: str, flops: int) -> None:
        self.phase.flops[kind] += flops
        if self.in_pass:
            self.phase.flops_in_passes[kind] += flops
            self._stretch.flops[kind] += flops

    def wait(self, kind: str) -> None:
        """The host waits for the device."""
        line = find_line()
        self.phase.waits[kind, line] += 1
        if self.in_pass:
            self.phase.waits_in_passes[kind, line] += 1

    def copy_to_host(self, tensor: torch.Tensor, waits: bool) -> None:
        line = find_line()
        self.phase.copies["to host", line] += count_bytes(tensor)
        if waits:
            self.wait("copy to host")

    def copy_to_device(self, tensor: torch.Tensor, waits: bool) -> None:
        """`waits`: from memory that is not pinned, which the host waits for until it is staged."""
        self.phase.copies["to device", find_line()] += count_bytes(tensor)

    def collective(self, kind: str, group: str, nbytes: int, ranks: Sequence[int] = ()) -> Callable[[], None]:
        """Return what to call when the device waits for it. `nbytes`: of the whole tensor; `ranks`: of the group, none where the exchange
        is the host's own."""
        entry = self.phase.collectives[kind, group, find_line()]
        entry[0] += 1
        entry[1] += nbytes
        if not ranks:
            return lambda: None
        size = len(ranks)
        share = {"all-reduce": 2 * (size - 1) / size, "send": 1, "receive": 0}.get(kind, (size - 1) / size)
        self.phase.sent[group, min(ranks), max(ranks), self.in_pass] += share * nbytes
        if not self.in_pass:
            return lambda: None
        phase, number = self.phase, len(self.phase.timeline)
        self._end_stretch(number, (group, min(ranks), max(ranks), share * nbytes))
        return lambda: self._end_stretch(number) if self.phase is phase else None

    def _end_stretch(self, exchange: int, sent: tuple[str, int, int, float] | None = None) -> None:
        self._stretch.exchange, self._stretch.sent = exchange, sent
        self.phase.timeline.append(self._stretch)
        self._stretch = Stretch()


def _share_memory(tensors: list[torch.Tensor]) -> bool:
    return len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors)


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


def _factors(args: tuple) -> list[torch.Tensor]:
    """Return the two factors among a product's positional arguments; `out=` is none of them, and a dtype may follow them."""
    return [value for value in args if isinstance(value, torch.Tensor)][-2:]


def _kind(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "fp32"}.get(dtype, "fp8")
