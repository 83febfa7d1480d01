"""Profiles record only the configured steps and ranks, the first micro-batches of each phase, and a readable trace."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_rl.observability.profiling import StepProfiler, begin_micro_batch


def run_steps(profiler: StepProfiler) -> None:
    x = torch.ones(8, 8)
    for step in (1, 2, 3):
        with profiler.step(step):
            for phase in ("logprobs", "train"):
                with profiler.phase(phase):
                    for _ in range(10):
                        begin_micro_batch()
                        x @ x if phase == "train" else x.exp()


def test_the_first_micro_batches_of_each_phase_are_recorded(tmp_path: Path):
    run_steps(StepProfiler(tmp_path, 1, steps=[2], ranks=[0, 1]))
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["step_00002_rank_00001.json", "step_00002_rank_00001.trace.json.gz"]
    found = json.loads((tmp_path / "profile" / names[0]).read_text())
    calls = {operator["name"]: operator["calls"] for operator in found["operators"]}
    assert (found["step"], found["rank"]) == (2, 1) and calls["aten::mm"] == calls["aten::exp"] == found["micro_batches"] == 4
    assert all(operator["host_ms"] >= 0 == operator["device_ms"] for operator in found["operators"])
    with gzip.open(tmp_path / "profile" / names[1]) as file:
        events = json.load(file)["traceEvents"]
    assert {"phase: logprobs", "phase: train", "aten::mm"} <= {event.get("name") for event in events}


def test_other_ranks_and_steps_write_nothing_and_nsys_records_its_own_steps(tmp_path: Path, monkeypatch):
    run_steps(StepProfiler(tmp_path, 2, steps=[2], ranks=[0, 1]))
    run_steps(StepProfiler(tmp_path, 0, steps=[7], ranks=[0]))
    run_steps(StepProfiler(tmp_path, 0))
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    run_steps(StepProfiler(tmp_path, 0, steps=[2], ranks=[0]))
    assert not list(tmp_path.iterdir())


def test_a_step_that_fails_leaves_no_profiler_running(tmp_path: Path):
    profiler = StepProfiler(tmp_path, 0, steps=[1, 2], ranks=[0])
    with pytest.raises(RuntimeError), profiler.step(1):
        raise RuntimeError("the engine died")
    run_steps(profiler)
    assert (tmp_path / "profile" / "step_00002_rank_00000.json").exists()
