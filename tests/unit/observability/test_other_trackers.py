"""Weights & Biases and MLflow by their real packages, offline; a package that is missing is named before anything starts."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_rl.training.loop  # noqa: F401 - with all that declares metrics
from megatron_rl.errors import UserError
from megatron_rl.observability.run_log import RunLog
from megatron_rl.observability.trackers import Trackers

ROWS = [{"step": 0, "reward/mean": 0.25, "grad_norm": math.nan}, {"step": 1, "reward/mean": 0.5, "grad_norm": 2.0}]


def config(tracker: str) -> dict:
    return {"train": {"steps": 2, "layout": {"tp": 1}}, "model": {"path": Path("m")}, "log": {"trackers": [tracker]}}


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
    assert run.data.params["train.layout.tp"] == "1" and run.data.params["model.path"] == "m"
    history = mlflow_client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.25), (1, 0.5)]
    assert math.isnan(mlflow_client.get_metric_history(run.info.run_id, "grad_norm")[0].value)


def test_mlflow_tells_a_resumed_run_from_the_first(tmp_path, mlflow_client):
    trackers = Trackers(pytest.fail)
    trackers.start(["mlflow"], tmp_path, config("mlflow"), 7)
    trackers.finish("finished")
    (run,) = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("megatron-rl").experiment_id])
    assert run.data.tags["resumed_from_step"] == "7"


def test_wandb_writes_every_step_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_run(tmp_path, "wandb", "finished")
    wandb.teardown()  # as at the end of a process: its service writes on for a while after a run has finished
    (record,) = tmp_path.rglob("run-*.wandb")
    written = record.read_bytes()  # protocol buffers, whose strings are plain
    for text in (b"reward/mean", b"0.25", b"0.5", b"grad_norm", b"NaN", b'"steps"'):
        assert text in written, text


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log.trackers = 'wandb': does not start .*; pip install wandb, or remove it from the list"):
        Trackers(pytest.fail).start(["wandb"], tmp_path, config("wandb"), None)


def test_neither_is_imported_unless_it_is_named():
    code = "import sys, megatron_rl.observability.run_log, megatron_rl.plugs; print('wandb' in sys.modules, 'mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
