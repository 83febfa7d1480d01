"""What a run records while it runs: the seconds and memory of its phases, the rows of its log, and samples."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.diagnosis.mismatch import bin_mismatch
from megatron_rl.distributed import Rank0, gather_from_ranks
from megatron_rl.mcore.passes import reduce
from megatron_rl.metrics import STEP_SECONDS, declare
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.profiling import StepProfiler
from megatron_rl.observability.run_log import RunLog
from megatron_rl.rollout.engine import Engine
from megatron_rl.training.samples import StepSamples

_MIB = 1 << 20
_VERSION = declare("policy_version", "optimizer steps behind the policy", "index")
_STEP = declare("time/step", "the whole step", "seconds")
_SECONDS = {
    "share": declare("time/share", "giving every replica its samples", "seconds", STEP_SECONDS),
    "logprobs": declare("time/logprobs", "forward passes of actor and reference", "seconds", STEP_SECONDS),
    "compare": declare("time/compare", "comparing tokens of the newest version, if the step has none", "seconds", STEP_SECONDS),
    "attribute": declare("time/attribute", "forward passes that attribute the mismatch to its causes", "seconds", STEP_SECONDS),
    "values": declare("time/values", "the critic's forward passes and the advantages", "seconds", STEP_SECONDS),
    "critic": declare("time/critic", "the critic's optimizer steps", "seconds", STEP_SECONDS),
    "train": declare("time/train", "the optimizer steps", "seconds", STEP_SECONDS),
    "checkpoint": declare("time/checkpoint", "writing a checkpoint after the previous step", "seconds"),
}
_OTHERS = "engine, or device (MiB)"
_TRAINER, _ENGINE, _DEVICE = (
    declare("memory/{}_mb", "memory of the largest trainer rank in the phase “{}”", "MiB", "trainer (MiB)", label="{}"),
    declare("memory/engine_{}_mb", "memory of the engine at the end of the phase “{}”", "MiB", _OTHERS, label="{}"),
    declare("memory/device_{}_mb", "memory that all programs held on the fullest device after the phase “{}”", "MiB", _OTHERS, label="{}"),
)


class Recorder:
    """Writes rows of metrics and some completions of each step to `log`, and marks phases in the profiles of `profiler`."""

    def __init__(self, log: Rank0[RunLog], engines: Rank0[Engine], profiler: StepProfiler) -> None:
        self._log, self._engines, self.profiler = log, engines, profiler
        self.seconds: dict[str, float] = {}
        """Seconds of the phases since the last row, by metric."""
        self._memory: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that reports a phase to the progress bar and the watchdog, and records its seconds and memory."""
        self._log.run_local(lambda log: log.set_phase(name))
        hang_watchdog.enter_phase(name)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with self.profiler.phase(name):
            yield
        self._measure_memory(name)
        if name in _SECONDS:
            self.seconds[_SECONDS[name]] = time.perf_counter() - start

    def write_row(self, version: int, metrics: dict[str, float], seconds: float | None) -> None:
        """Write the row of a policy version, with the seconds and memory of all phases since the last row. `seconds` is the duration of the
        whole step, or None if no step was run. Collective."""
        row = {"step": version, _VERSION: version, **metrics, **self.seconds}
        self.seconds = {}
        if seconds is not None:
            row[_STEP] = seconds
        memory_by_rank, self._memory = gather_from_ranks(self._memory, dict[str, float]), {}
        for name in memory_by_rank[0]:  # the engine's memory is on rank 0 only
            row[name] = max(memory[name] for memory in memory_by_rank if name in memory)
        self._log.run_local(lambda log: log.write_step(row))

    def write_samples(self, step: int, samples: StepSamples, compared: list[TrainingSample]) -> None:
        """Write the completions that the report shows, with their advantages and, if they are among those `compared` on this replica, their
        mismatch. Collective."""
        shown = set(samples.shown)
        bins = {sample.number: bin_mismatch(sample) for sample in compared if sample.number in shown}
        own = {sample.number: (sample.advantage, bins.get(sample.number, [])) for sample in samples.own if sample.number in shown}
        of_all = reduce.merge_replicas(own, tuple[float | None, list[tuple[int, float]]])
        for number, row in zip(samples.shown, samples.rows, strict=False):
            row["advantage"], row["mismatch"] = of_all[number]
        self._log.run_local(lambda log: log.write_samples(step, samples.rows))

    def _measure_memory(self, phase: str) -> None:
        """Record the memory of a phase in MiB: the peak on a GPU, the memory held at the end on a CPU."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self._memory[_DEVICE.format(phase)] = (total - free) / _MIB
            self._memory[_TRAINER.format(phase)] = torch.cuda.max_memory_allocated() / _MIB
        else:
            self._memory[_TRAINER.format(phase)] = psutil.Process().memory_info().rss / _MIB
            self._engines.run_local(lambda engines: self._memory.update({_ENGINE.format(phase): engines.get_memory_mb()}))
