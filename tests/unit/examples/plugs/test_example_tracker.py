"""The example tracker in a run log and in a resumed run, and trackers that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatron_rl.training.loop  # noqa: F401 - with all that declares metrics
from megatron_rl.errors import UserError
from megatron_rl.observability.run_log import RunLog, read_metrics, read_run

CSV = "examples.plugs.csv_tracker:CsvTracker"
OWN = """
calls = []

class Fails:
    def __init__(self, folder, config, resume_step): calls.append(("start", folder.name, config["train"], resume_step))
    def log(self, row, step): raise OSError(f"no network at {step}")
    def finish(self, status): calls.append(status); raise OSError("still none")

class Absent:
    def __init__(self, folder, config, resume_step): raise PermissionError("no key")
"""


def config(*trackers: str) -> dict:
    return {"train": {"steps": 3}, "log": {"trackers": list(trackers)}}


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_every_value_is_a_line_and_a_resumed_run_forgets_later_steps(tmp_path):
    log = RunLog.create(tmp_path, config(CSV), {})
    for step in range(3):
        log.write_step({"step": step, "reward/mean": step / 2, "grad_norm": float("nan")})
    log.finish("broken", "a reason")
    again = RunLog.reopen(log.dir, config(CSV), {}, 1)
    again.write_step({"step": 2, "reward/mean": 7.0})
    again.finish("finished")
    lines = (log.dir / "metrics.csv").read_text().split()
    expected = "step,metric,value 0,reward/mean,0.0 0,grad_norm,nan 1,reward/mean,0.5 1,grad_norm,nan 2,reward/mean,7.0"
    assert lines == expected.split()
    assert not (log.dir / "tensorboard").exists()


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(tmp_path, own, capsys):
    log = RunLog.create(tmp_path / "runs", config("own_trackers:Fails", CSV), {})
    for step in (1, 2):
        log.write_step({"step": step, "reward/mean": 0.5})
    log.finish("finished")
    told = [line for line in capsys.readouterr().out.splitlines() if "Fails" in line]
    assert told == ["tracker own_trackers:Fails failed, the run continues (OSError: no network at 1)"]
    assert len(read_metrics(log.dir)) == 2 and len((log.dir / "metrics.csv").read_text().split()) == 3
    assert read_run(log.dir)["status"] == "finished"
    import own_trackers

    assert own_trackers.calls == [("start", log.dir.name, {"steps": 3}, None), "finished"]


def test_a_tracker_that_does_not_start_ends_the_run_before_anything_else_has(tmp_path: Path, own):
    line = r"log.trackers = 'own_trackers:Absent': does not start \(PermissionError: no key\); repair it, or remove it from the list"
    with pytest.raises(UserError, match=line):
        RunLog.create(tmp_path / "runs", config(CSV, "own_trackers:Absent"), {})
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_run(folder)["status"] == "broken" and "own_trackers:Absent" in read_run(folder)["reason"]
    RunLog.reopen(folder, config(CSV), {}, 0).finish("finished")  # its lock is free again
