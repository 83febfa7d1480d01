"""A rank's log and its profile."""

import gzip
import json
import logging
import os
import warnings
from pathlib import Path

import pytest
import torch

from megatron_rl.errors import RunError
from megatron_rl.observability.profiling import StepProfiler, begin_micro_batch
from megatron_rl.observability.rank_log import rank_log


def read_log(folder) -> str:
    return (folder / "ranks" / "rank_00003.log").read_text()


def test_warnings_of_all_kinds_are_in_it_and_nothing_less(tmp_path, monkeypatch, capsys):
    before = list(logging.getLogger().handlers)
    with rank_log(tmp_path, 3, 8):
        logging.getLogger("a.library").warning("careful: %d", 5)
        logging.getLogger("a.library").info("chatter")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        assert "WARNING a.library: careful: 5" in read_log(tmp_path), "it is on the disk at once"
    logging.getLogger("a.library").warning("after the run")
    first, *rest = read_log(tmp_path).splitlines()
    assert f" rank 3 of 8: process {os.getpid()} on " in first
    assert any("WARNING py.warnings: " in line and "DeprecationWarning: old" in line for line in rest)
    assert "chatter" not in read_log(tmp_path) and "after" not in read_log(tmp_path)
    assert logging.getLogger().handlers == before
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # without handlers they still go to the console
    with rank_log(tmp_path, 3, 8):
        logging.getLogger("a.library").warning("unhandled")
    assert "unhandled" in capsys.readouterr().err and "unhandled" in read_log(tmp_path)


def test_how_a_rank_ended(tmp_path):
    for error in (RunError("the engine is gone"), ZeroDivisionError("a bug")):
        with pytest.raises(type(error)), rank_log(tmp_path, 3, 8):
            raise error
    assert "ended: RunError: the engine is gone\n" in read_log(tmp_path)
    assert "Traceback" in read_log(tmp_path) and "ZeroDivisionError: a bug\n" in read_log(tmp_path)
    assert read_log(tmp_path).count("rank 3 of 8") == 2, "a run that goes on writes on"


def run_steps(profiler: StepProfiler) -> None:
    x = torch.ones(8, 8)
    for step in (1, 2, 3):
        with profiler.step(step):
            for phase in ("logprobs", "train"):
                with profiler.phase(phase):
                    for _ in range(10):
                        begin_micro_batch()
                        with torch.profiler.record_function("Optimizer.step#Adam.step"):
                            x @ x if phase == "train" else x.exp()


def test_the_first_micro_batches_of_each_phase_are_recorded(tmp_path: Path):
    run_steps(StepProfiler(tmp_path, 1, steps=[2], ranks=[0, 1]))
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["step_00002_rank_00001.json", "step_00002_rank_00001.trace.json.gz"]
    found = json.loads((tmp_path / "profile" / names[0]).read_text())
    calls = {operator["name"]: operator["calls"] for operator in found["operators"]}
    assert (found["step"], found["rank"]) == (2, 1) and calls["aten::mm"] == calls["aten::exp"] == found["micro_batches"] == 4
    assert not [name for name in calls if "#" in name or "phase" in name], "no annotation"
    assert all(operator["host_ms"] >= 0 == operator["device_ms"] for operator in found["operators"])
    with gzip.open(tmp_path / "profile" / names[1]) as file:
        events = json.load(file)["traceEvents"]
    assert {"phase: logprobs", "phase: train", "aten::mm"} <= {event.get("name") for event in events}
    assert [[8, 8], [8, 8]] in [event.get("args", {}).get("Input Dims") for event in events], "operators have shapes"


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
