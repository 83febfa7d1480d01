"""The run folder: what is written can be read back, also after a crash; trackers: Weights & Biases, MLflow, the example, and what fails."""

import errno
import json
import math
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

import megatron_rl.training.loop  # noqa: F401  it declares what rows hold
from megatron_rl.errors import UserError, describe_disk_error
from megatron_rl.metrics import DECLARED, UndeclaredMetricWarning, group_by_panel, read_declarations
from megatron_rl.observability.console import progress_line, proof_verdict
from megatron_rl.observability.run_folder import read_jsonl, read_metrics, read_run
from megatron_rl.observability.run_log import RunLog
from megatron_rl.observability.trackers import Trackers


def config(*trackers: str) -> dict:
    return {"train": {"steps": 3, "layout": {"tp": 1}}, "model": {"path": Path("models/tiny")}, "log": {"trackers": list(trackers)}}


CONFIG = config("tensorboard")


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


def test_a_value_that_is_not_finite_or_outside_its_range_is_reported(log: RunLog, capsys: pytest.CaptureFixture[str]):
    log.write_step({"step": 1, "loss/policy": math.nan, "grad_norm": math.inf, "reward/mean": 0.5})
    log.write_samples(1, [{"advantage": math.nan}])
    for line in [*(log.dir / "metrics.jsonl").open(), *(log.dir / "samples.jsonl").open()]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    row = read_metrics(log.dir)[0]
    assert (row["loss/policy"], row["grad_norm"], row["reward/mean"]) == (None, None, 0.5)
    assert "step 1: not finite: loss/policy, grad_norm" in capsys.readouterr().out
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
    assert [row["step"] for row in read_metrics(log.dir)] == [0, 2]
    assert "metrics.jsonl: left out: line 2 (not JSON)" in capsys.readouterr().err


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


def test_a_broken_run_stays_broken_and_gives_its_reason(tmp_path: Path):
    log, late = (RunLog.create(tmp_path, CONFIG, {}) for _ in range(2))
    log.write_step({"step": 0})
    log.finish("broken", "engine died\nsignal 9")
    log.finish("finished")
    run = read_run(log.dir)
    assert (run["status"], run["reason"]) == ("broken", "engine died\nsignal 9")
    assert "run broken: engine died | signal 9" in (log.dir / "run.log").read_text()
    assert not (log.dir / "run.json.tmp").exists()
    late.finish("finished")
    late.finish("broken", "checkpoint not written")
    assert read_run(late.dir)["status"] == "broken", "also after it was finished"


def test_the_end_is_recorded_on_a_full_disk(log: RunLog, monkeypatch: pytest.MonkeyPatch):
    """A step's row is an error of the run, lines of run.log are not. The end has its own room, and is recorded although closing fails."""
    full = OSError(errno.ENOSPC, "No space left on device")

    class FullFile:
        closed = False
        write = Mock()
        flush = Mock(side_effect=full)
        close = Mock(side_effect=full)

    assert (log.dir / ".room").stat().st_size >= 1 << 20
    log._files |= {name: FullFile() for name in log._files}
    log.write_event("a line")
    with pytest.raises(OSError):
        log.write_step({"step": 0})
    log.finish("broken", describe_disk_error(full))
    assert (read_run(log.dir)["reason"], (log.dir / ".room").exists()) == ("No space left on device", False)


def test_a_full_disk_is_found_below_the_errors_of_writers():
    error = cause = OSError(errno.ENOSPC, "No space left on device", "/a/file")
    for wrapper in (cause, RuntimeError("in a writer"), ValueError("in another")):
        wrapper.__cause__ = None if wrapper is cause else error
        error = wrapper
        assert describe_disk_error(error) == "No space left on device (/a/file)"
    stream = RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0\nmore")
    assert describe_disk_error(stream).endswith("unexpected pos 64 vs 0)") and describe_disk_error(RuntimeError("else")) == ""


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
    lefts = {44.6: "45 s", 720.0: "12 min", 12_600.0: "3.5 h"}
    assert [progress_line(row, 30, seconds).plain for seconds in lefts] == [f"{line}  {left} left" for left in lefts.values()]
    sync = {"step": 0, "eval/accuracy": 0.421, "sync/bytes": 2.5e6, "sync/tensors": 4, "sync/proved": 4}
    assert progress_line(sync, 30).plain == "step 0/30  held-out 42.1%  sync 2.5 MB  4/4 tensors, proof ok"
    assert proof_verdict({"sync/tensors": 4, "sync/proved": 3}) == ("3/4 tensors, PROOF FAILED", False)
    sizes = {"sync/engine_bytes": 2.62e6, "sync/proved_bytes": 2.62e6}
    assert proof_verdict(sync | sizes) == ("4/4 tensors, 2.6/2.6 MB, proof ok", True)
    assert proof_verdict(sync | sizes | {"sync/proof_age": 3.0})[0] == "4/4 tensors, 2.6/2.6 MB, proof ok, reread 3 syncs ago"
    assert proof_verdict(sync | sizes | {"sync/proved_bytes": 2.4e6}) == ("4/4 tensors, 2.4/2.6 MB, PROOF FAILED", False)
    assert proof_verdict({"sync/tensors": 4}) == ("4 tensors, NOT PROVED", False)
    assert proof_verdict({}) == ("", True)
    phases = ("generate", "logprobs", "train", "sync", "proof", "served", "eval", "step")
    log.write_step({"step": 1, **{f"time/{phase}": 1.0 for phase in phases}})
    assert len(capsys.readouterr().out.splitlines()[-1]) > 80, "long lines are not broken in a log file"


ROWS = [{"step": 0, "reward/mean": 0.25, "grad_norm": math.nan}, {"step": 1, "reward/mean": 0.5, "grad_norm": 2.0}]


def write_run(folder: Path, tracker: str, status: str) -> RunLog:
    log = RunLog.create(folder, config(tracker), {})
    for row in ROWS:
        log.write_step(row)
    log.finish(status)
    return log


@pytest.fixture
def mlflow_client(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow or mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient()


@pytest.mark.parametrize(("status", "called"), [("finished", "FINISHED"), ("broken", "FAILED")])
def test_mlflow_has_the_configuration_and_every_value(tmp_path, mlflow_client, status, called):
    write_run(tmp_path, "mlflow", status)
    (run,) = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("megatron-rl").experiment_id])
    assert run.info.status == called
    assert run.data.params["train.layout.tp"] == "1" and run.data.params["model.path"] == "models/tiny"
    history = mlflow_client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.25), (1, 0.5)]
    assert math.isnan(mlflow_client.get_metric_history(run.info.run_id, "grad_norm")[0].value)
    trackers = Trackers(pytest.fail)
    trackers.start(["mlflow"], tmp_path, config("mlflow"), 7)
    trackers.finish("finished")
    assert {each.data.tags.get("resumed_from_step") for each in mlflow_client.search_runs([run.info.experiment_id])} == {None, "7"}


ODD = {
    "eval/source_train[:9]": "eval/source_train_:9_",
    "eval/pass@4": "eval/pass_at_4", "eval/source_a+b": "eval/source_a_b", "eval/source_a=b": None,
    "eval/source_x": "eval/source_x", "eval/source_x/y": "eval_source_x_y", "eval/source_../z": "eval/source_../z",
    "/a//./b": "a/b", "reward/part/" + "n" * 300: None, "eval/source_数学": "eval/source_数学", "eval/source_(語)": "eval/source__語_",
}  # fmt: skip


def test_a_metric_whose_name_mlflow_refuses_gets_another_and_no_two_share_one(tmp_path, mlflow_client):
    trackers = Trackers(pytest.fail)
    trackers.start(["mlflow"], tmp_path, config("mlflow") | {"data": {"settings": {"a@b": 1, "a+b": 2, "a=b": 3}}}, None)
    for step in range(2):
        trackers.log({name: step + number / 16 for number, name in enumerate(ODD)}, step)
    trackers.finish("finished")
    (run,) = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("megatron-rl").experiment_id])
    assert sorted(run.data.metrics.values()) == [1 + number / 16 for number in range(len(ODD))]
    for number, given in enumerate(ODD.values()):
        if given:
            assert [each.value for each in mlflow_client.get_metric_history(run.info.run_id, given)] == [number / 16, 1 + number / 16]
    assert {name for name in run.data.params if "settings" in name} >= {"data.settings.a_at_b", "data.settings.a_b"}


def test_tensorboard_has_every_name_as_it_is(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers(pytest.fail)
    trackers.start(["tensorboard"], tmp_path, config("tensorboard"), None)
    trackers.log({name: number / 16 for number, name in enumerate(ODD)}, 0)
    trackers.finish("finished")
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert {name: found.Scalars(name)[0].value for name in found.Tags()["scalars"]} == {name: n / 16 for n, name in enumerate(ODD)}


def test_a_refused_metric_takes_no_others_with_it_and_is_named_once(tmp_path, mlflow_client):
    told = []
    trackers = Trackers(told.append)
    trackers.start(["mlflow"], tmp_path, config("mlflow"), None)
    for step in range(3):
        trackers.log(
            {"reward/mean": 0.5, "reward/odd": "text", "grad_norm": 1.0} | {f"router/load/layer_{n}": 1.0 for n in range(1200)}, step
        )
    trackers.finish("finished")
    (run,) = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("megatron-rl").experiment_id])
    assert len(run.data.metrics) == 1202 and len(mlflow_client.get_metric_history(run.info.run_id, "grad_norm")) == 3
    assert len(told) == 1 and told[0].startswith("tracker mlflow refuses metrics, which it will not get (reward/odd: ")


def test_tensorboard_keeps_every_name(tmp_path):
    trackers = Trackers(pytest.fail)
    trackers.start(["tensorboard"], tmp_path, config("tensorboard"), None)
    trackers.log(dict.fromkeys(ODD, 0.5), 1)
    trackers.finish("finished")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {name: [each.value for each in events.Scalars(name)] for name in ODD} == {name: [0.5] for name in ODD}


def test_wandb_writes_every_step_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = Trackers(pytest.fail)
    trackers.start(["wandb"], tmp_path, config("wandb"), None)
    for row in ROWS:
        trackers.log({**row, "eval/pass@4": 0.125, "eval/source_数": 2.0, "eval/source_語": 3.0}, row["step"])
    trackers.finish("finished")
    wandb.teardown()  # as at the end of a process: its service writes on for a while after a run has finished
    (record,) = tmp_path.rglob("run-*.wandb")
    written = record.read_bytes()  # protocol buffers, whose strings are plain
    for text in (b"reward/mean", b"0.25", b"0.5", b"grad_norm", b"NaN", b'"steps"', b"eval/pass_at_4", b"eval/source__", b"eval/source___"):
        assert text in written, text


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log.trackers = 'wandb': does not start .*; pip install wandb, or remove it from the list"):
        Trackers(pytest.fail).start(["wandb"], tmp_path, config("wandb"), None)


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


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_every_value_is_a_line_and_a_resumed_run_forgets_later_steps(tmp_path):
    log = RunLog.create(tmp_path, config(CSV), {})
    for step in range(3):
        log.write_step({"step": step, "reward/mean": step / 2, "grad_norm": float("nan")})
    log.finish("broken", "a reason")
    again = RunLog.reopen(log.dir, config(CSV), {}, {}, 1)
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

    assert own_trackers.calls == [("start", log.dir.name, {"steps": 3, "layout": {"tp": 1}}, None), "finished"]


def test_a_tracker_that_does_not_start_ends_the_run_before_anything_else_has(tmp_path: Path, own):
    line = r"log.trackers = 'own_trackers:Absent': does not start \(PermissionError: no key\); repair it, or remove it from the list"
    with pytest.raises(UserError, match=line):
        RunLog.create(tmp_path / "runs", config(CSV, "own_trackers:Absent"), {})
    (folder,) = (tmp_path / "runs").iterdir()
    assert read_run(folder)["status"] == "broken" and "own_trackers:Absent" in read_run(folder)["reason"]
    RunLog.reopen(folder, config(CSV), {}, {}, 0).finish("finished")  # its lock is free again
