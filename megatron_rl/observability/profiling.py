"""Profiles the steps of `log.profile_steps` on the ranks of `log.profile_ranks` with torch.profiler.

    RUN_DIR/profile/step_00003_rank_00000.trace.json.gz   a Chrome trace, for Perfetto (ui.perfetto.dev)
    RUN_DIR/profile/step_00003_rank_00000.json            the operators that took longest, which the report shows

Only the first micro-batches of each phase are recorded, because the trace of a large step would not fit into memory.

On a GPU every phase is an NVTX range, and a profiled step lies between cudaProfilerStart and cudaProfilerStop. So

    nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat megatron-rl train CONFIG --log.profile_steps=[3]

records the same steps. CUPTI serves one profiler at a time, so torch.profiler is off under nsys.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_rl.observability.files import replace_file

_MICRO_BATCHES = 4  # micro-batches recorded per phase
_OPERATORS = 25  # operators kept in the table
_PHASE = "phase: "


def runs_under_nsys() -> bool:
    """Return whether this process runs under Nsight Systems, which sets this variable."""
    return "NSYS_PROFILING_SESSION_ID" in os.environ


class StepProfiler:
    """Profiles one rank, if `ranks` contains it. Without `steps`, only NVTX ranges remain."""

    def __init__(self, run: Path, rank: int, steps: Sequence[int] = (), ranks: Sequence[int] = ()) -> None:
        self._folder, self._rank = run / "profile", rank
        self._steps = frozenset(steps) if rank in ranks else frozenset()
        self._on_gpu = torch.cuda.is_available()
        self._profile: profile | None = None
        self._recording, self._micro_batches = False, 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context manager that profiles the enclosed step if it is in `steps`, and writes its files."""
        global _active
        if step not in self._steps:
            yield
            return
        with ExitStack() as parts:
            if self._on_gpu:
                torch.cuda.profiler.start()
                parts.callback(torch.cuda.profiler.stop)
            if not runs_under_nsys():
                # acc_events keeps the operators of all phases until the end of the step
                self._profile = parts.enter_context(profile(activities=self._activities(), record_shapes=True, acc_events=True))
                self._recording, _active = True, self
            try:
                yield
            finally:
                recorded, self._profile, _active = self._profile, None, None
        if recorded is not None:
            self._write(step, recorded)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that marks a phase: an NVTX range on a GPU, and a range of the trace in a profiled step."""
        with ExitStack() as ranges:
            if self._on_gpu:
                ranges.enter_context(torch.cuda.nvtx.range(name))
            if self._profile is not None:
                self._micro_batches = 0
                self._record(True)
                ranges.enter_context(record_function(f"{_PHASE}{name}"))
            yield

    def begin_micro_batch(self) -> None:
        """See the module's `begin_micro_batch`."""
        self._micro_batches += 1
        if self._micro_batches > _MICRO_BATCHES:
            self._record(False)

    def _record(self, wanted: bool) -> None:
        if self._profile is not None and wanted != self._recording:
            self._recording = wanted
            self._profile.toggle_collection_dynamic(wanted, self._activities())

    def _activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]

    def _write(self, step: int, recorded: profile) -> None:
        self._folder.mkdir(exist_ok=True)
        name = f"step_{step:05d}_rank_{self._rank:05d}"
        recorded.export_chrome_trace(str(self._folder / f"{name}.trace.json.gz"))
        found = {"step": step, "rank": self._rank, "micro_batches": _MICRO_BATCHES, "operators": _list_operators(recorded)}
        replace_file(self._folder / f"{name}.json", json.dumps(found, indent=1))


_active: StepProfiler | None = None


def begin_micro_batch() -> None:
    """Count a micro-batch of the current phase. Does nothing outside profiled steps."""
    if _active is not None:
        _active.begin_micro_batch()


def _list_operators(recorded: profile) -> list[dict[str, Any]]:
    """Return the operators with the most self time: name, calls, and self milliseconds on device and host. Annotations, such as phases and
    `Optimizer.step`, are left out: their time is that of the kernels within."""
    events = [event for event in recorded.key_averages() if not event.is_user_annotation]
    events.sort(key=lambda event: (-event.self_device_time_total, -event.self_cpu_time_total))
    return [
        {
            "name": event.key,
            "calls": event.count,
            "device_ms": event.self_device_time_total / 1e3,
            "host_ms": event.self_cpu_time_total / 1e3,
        }
        for event in events[:_OPERATORS]
    ]
