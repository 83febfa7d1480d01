"""The run folder: what is written can be read back, also after a crash, and a run is finished only when it says so."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

import megatron_rl.training.loop  # noqa: F401  it declares what rows hold
from megatron_rl.errors import UserError
from megatron_rl.metrics import DECLARED, UndeclaredMetricWarning, group_by_panel, read_declarations
from megatron_rl.observability.console import progress_line, proof_verdict
from megatron_rl.observability.run_log import RunLog, read_jsonl, read_metrics, read_run

CONFIG = {"train": {"steps": 3}, "model": {"path": Path("models/tiny")}, "log": {"trackers": ["tensorboard"]}}


@pytest.fixture
def log(tmp_path: Path):
    log = RunLog.create(tmp_path / "runs", CONFIG, {"torch": "2.0"})
    yield log
    log.finish("finished")


def test_round_trip(log: RunLog):
    log.write_step({"step": 0, "policy_version": 0, "eval/accuracy": 0.5})
    log.write_step({"step": 1, "policy_version": 1, "reward/mean": np.float32(0.25)})
    events = EventAccumulator(str(log.dir / "tensorboard"))
    log.write_samples(1, [{"prompt": "1+1=", "completion": "\ud800\u2028\n#2", "reward": 1.0, "correct": True}])
    # read before the run ends: each row is on the disk when step() returns
    rows = read_metrics(log.dir)
    assert [(row["step"], row.get("eval/accuracy"), row.get("reward/mean")) for row in rows] == [(0, 0.5, None), (1, None, 0.25)]
    assert read_jsonl(log.dir / "samples.jsonl")[0] == [
        {"step": 1, "prompt": "1+1=", "completion": "\ud800\u2028\n#2", "reward": 1.0, "correct": True}
    ]
    assert read_run(log.dir)["status"] == "running"
    log.finish("finished")
    run = read_run(log.dir)
    assert run["status"] == "finished" and run["versions"] == {"torch": "2.0"}
    assert run["config"] == {**CONFIG, "model": {"path": "models/tiny"}}
    assert [(event.step, event.value) for event in events.Reload().Scalars("reward/mean")] == [(1, 0.25)]


def test_a_run_declares_its_metrics_and_a_row_holds_no_others(log: RunLog):
    """TensorBoard gets the panels, with patterns that match the names."""
    declared = read_declarations(json.loads((log.dir / "run.json").read_text()))
    assert declared == DECLARED and "reward/mean" in declared and not log.dir.joinpath("metrics.jsonl").read_text()
    with pytest.raises(UndeclaredMetricWarning, match="metric nobody/said is not declared"):
        log.write_step({"step": 1, "reward/mean": 0.5, "nobody/said": 1.0})
    log.finish("finished")
    events = EventAccumulator(str(log.dir / "tensorboard")).Reload()
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert charts.keys() == group_by_panel().keys() and charts["reward"] == ["reward/mean"]
    assert all(re.fullmatch(charts["correct, by level or set"][0], name) for name in ("eval/level_1", "eval/level_10"))


def test_not_finite_stays_json_and_is_said(log: RunLog, capsys: pytest.CaptureFixture[str]):
    log.write_step({"step": 1, "loss/policy": math.nan, "grad_norm": math.inf, "reward/mean": 0.5})
    log.write_samples(1, [{"advantage": math.nan}])
    for line in [*(log.dir / "metrics.jsonl").open(), *(log.dir / "samples.jsonl").open()]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    row = read_metrics(log.dir)[0]
    assert (row["loss/policy"], row["grad_norm"], row["reward/mean"]) == (None, None, 0.5)
    assert "step 1: not finite: loss/policy, grad_norm" in capsys.readouterr().out


def test_a_value_outside_its_range_is_warned_of_until_it_is_back(log: RunLog, capsys: pytest.CaptureFixture[str]):
    for step, response in enumerate((1.0, 215.0, 180.0, 1.1, 0.0, math.nan)):
        log.write_step({"step": step, "precision/response": response, "grad_norm": 1e9})
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert [line.partition(" is ")[0] for line in warnings] == [f"warning: step {step}: precision/response" for step in (1, 4)]
    assert "215, expected 0.5 to 2" in warnings[0] and "cell boundaries" in warnings[0] and "cell centers" in warnings[1]


def test_torn_last_line_is_left_out_and_said(log: RunLog, capsys: pytest.CaptureFixture[str]):
    log.write_step({"step": 0})
    log.write_step({"step": 1})
    path = log.dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [row["step"] for row in read_metrics(log.dir)] == [0]
    assert "metrics.jsonl: the last line (line 2) is torn and was skipped" in capsys.readouterr().err
    with path.open("ab") as file:
        file.write(b'\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_metrics(log.dir)


def test_two_runs_in_one_second_and_latest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    logs = [RunLog.create(tmp_path / "runs", CONFIG, {}) for _ in range(3)]
    assert len({log.dir for log in logs}) == 3
    assert (tmp_path / "runs" / "latest").resolve() == logs[-1].dir.resolve()
    assert not list(tmp_path.glob("runs/.latest*"))
    (tmp_path / "latest").mkdir()  # a folder of the user's is kept
    logs.append(RunLog.create(tmp_path, CONFIG, {}))
    for log in logs:
        log.finish("finished")
    assert not (tmp_path / "latest").is_symlink()
    assert "no link" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"log\.dir"):
        RunLog.create(tmp_path / "file", CONFIG, {})


def break_run(parent: Path, reason: str, finished: bool = False) -> RunLog:
    """A run that breaks after its first step, or after it had called itself finished."""
    log = RunLog.create(parent, CONFIG, {})
    if finished:
        log.finish("finished")
    else:
        log.write_step({"step": 0})
    log.finish("broken", reason)
    return log


def test_what_ends_a_run_breaks_it_for_good_and_gives_its_reason(tmp_path: Path):
    log = break_run(tmp_path, "engine died\nsignal 9")
    log.finish("finished")
    run = read_run(log.dir)
    assert (run["status"], run["reason"]) == ("broken", "engine died\nsignal 9")
    assert "run broken: engine died | signal 9" in (log.dir / "run.log").read_text()
    assert not (log.dir / "run.json.tmp").exists()
    late = break_run(tmp_path, "checkpoint not written", finished=True)
    assert read_run(late.dir)["status"] == "broken", "also after it was finished"


def test_events_are_one_line_and_never_markup(log: RunLog, capsys: pytest.CaptureFixture[str]):
    log.write_event("a [/bold] bracket \ud800\nsecond")
    assert "a [/bold] bracket" in (text := capsys.readouterr().out)
    assert text.endswith(" | second\n")
    assert "a [/bold] bracket \\ud800 | second" in (log.dir / "run.log").read_text()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"status": "great"}'])
def test_no_run_folder(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(UserError, match="RUN_DIR"):
        read_run(tmp_path)


def test_progress_line_says_what_was_measured(log: RunLog, capsys: pytest.CaptureFixture[str]):
    row = {"step": 7, "reward/mean": 0.5, "mismatch/abs_mean": None, "time/step": 3.0, "time/generate": 2.0, "time/train": 0.75}
    line = "step 7/30  reward 0.500  mismatch/abs_mean NOT FINITE  3.0 s (generate 2.0, train 0.8)"
    assert progress_line(row, 30).plain == line
    sync = {"step": 0, "eval/accuracy": 0.421, "sync/bytes": 2.5e6, "sync/tensors": 4, "sync/proved": 4}
    assert progress_line(sync, 30).plain == "step 0/30  held-out 42.1%  sync 2.5 MB  4/4 tensors, proof ok"
    assert proof_verdict({"sync/tensors": 4, "sync/proved": 3}) == ("3/4 tensors, PROOF FAILED", False)
    assert proof_verdict({"sync/tensors": 4}) == ("4 tensors, NOT PROVED", False)
    assert proof_verdict({}) == ("", True)
    phases = ("generate", "logprobs", "train", "sync", "proof", "served", "eval", "step")
    log.write_step({"step": 1, **{f"time/{phase}": 1.0 for phase in phases}})
    assert len(capsys.readouterr().out.splitlines()[-1]) > 80, "long lines are not broken in a log file"
