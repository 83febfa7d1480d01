"""A run whose trainer loads two tensors into each other's place stops before its engine samples."""

import os

import pytest
from support.processes import ROOT, Command
from support.train_command import TINY, finish, latest, make_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def test_a_run_that_loads_two_tensors_into_each_others_place_stops_before_it_samples(tmp_path, monkeypatch):
    for name, value in {"ONE": "mlp.gate_proj", "OTHER": "mlp.up_proj"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engine"))))
    arguments = make_model(tmp_path, TINY | {"model.path": tmp_path / "model", "log.dir": tmp_path / "runs"})
    done = finish(Command(tmp_path / "wrong", "exchanged_train", "train", *arguments))
    line = "linear_fc1.weight of trainer rank 0 should hold the checkpoint's model.layers.0.mlp.gate_proj.weight from row "
    assert done.code == 3 and line in done.err and "Traceback" not in done.err, done.err
    assert "canary" not in (latest(tmp_path) / "run.log").read_text()
    assert not (latest(tmp_path) / "metrics.jsonl").exists() or not (latest(tmp_path) / "metrics.jsonl").read_text()
    monkeypatch.setenv("OTHER", "mlp.gate_proj")
    done = finish(Command(tmp_path / "right", "exchanged_train", "train", *arguments))
    assert done.code == 0 and "hold the checkpoint's values of the same name" in (latest(tmp_path) / "run.log").read_text(), done.err
