"""What a run records while it runs: its phases with their seconds and memory, the rows of its log, and samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.distributed import Rank0, gather_from_ranks
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.run_log import RunLog
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.worker import build_sample_rows
from megatron_rl.types import Completion

_MIB = 1 << 20


class Recorder:
    """Writes to `log`: rows of metrics, and `samples` completions of each step."""

    def __init__(self, log: Rank0[RunLog], engines: Rank0[Engine], samples: int) -> None:
        self._log, self._engines, self._samples = log, engines, samples
        self._memory: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, metrics: dict[str, float] | None = None) -> Iterator[None]:
        """Show a phase on the progress bar and to the watchdog, and measure its memory; set `metrics["time/NAME"]` to its seconds."""
        self._log.tell(lambda log: log.set_phase(name))
        hang_watchdog.enter_phase(name)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        yield
        self._measure_memory(name)
        if metrics is not None:
            metrics[f"time/{name}"] = time.perf_counter() - start

    def write_row(self, version: int, metrics: dict[str, float], seconds: float | None) -> None:
        """Write the row of a policy version, whose step took `seconds`, with the memory of all phases since the last row. Collective."""
        row = {"step": version, "policy_version": version, **metrics}
        if seconds is not None:
            row["time/step"] = seconds
        largest: dict[str, float] = {}  # of all ranks
        for memory in gather_from_ranks(self._memory):
            largest |= {name: max(value, largest.get(name, value)) for name, value in memory.items()}
        self._memory = {}
        self._log.tell(lambda log: log.write_step(row | largest))

    def write_samples(self, step: int, completions_B: Sequence[Completion], samples_B: Sequence[TrainingSample]) -> None:
        """Write some of a step's completions, with the advantages of the samples made from them."""
        for completion, sample in zip(completions_B, samples_B, strict=True):
            completion.advantage = sample.advantage
        self._log.tell(lambda log: log.write_samples(step, build_sample_rows(step, completions_B, self._samples)))

    def _measure_memory(self, phase: str) -> None:
        """Record the memory held in a phase, in MiB: on a GPU its peak, on a CPU what is held at its end."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._memory[f"memory/device_{phase}_mb"] = (total - free) / _MIB
            self._memory[f"memory/{phase}_mb"] = torch.cuda.max_memory_allocated() / _MIB
        else:
            self._memory[f"memory/{phase}_mb"] = psutil.Process().memory_info().rss / _MIB
            self._engines.tell(lambda engines: self._memory.update({f"memory/engine_{phase}_mb": engines.get_memory_mb()}))
