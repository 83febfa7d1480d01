"""A run that promises a mismatch of 0 does not sample with an engine that computes by another kernel, or in another environment."""

import os

import planted_server
import pytest
from support.processes import ROOT
from support.train_command import finish, latest, read_json, read_rows, train

PLANTED = {
    "another norm": r"layer 0: input_norm: the engine computes with sglang.srt.layers.layernorm.RMSNorm.forward_native (sglang 0.5.23, ",
    "another package": "the engine has torch 2.0.0, the trainer torch 2.",
    "another device": "the engine's device is Another CPU, the trainer's ",
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["another norm", *(pytest.param(name, marks=pytest.mark.long) for name in list(PLANTED)[1:])])
def test_a_run_ends_before_it_samples(name, tmp_path, monkeypatch):
    planted_server.set_fault(tmp_path / "fault", name)
    monkeypatch.setenv(planted_server.FILE_VARIABLE, str(tmp_path / "fault"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engine"))))
    done = finish(train(tmp_path, module="planted_run"))
    reason = read_json(latest(tmp_path) / "run.json")["reason"]
    assert done.code == 3 and f"the run promises a mismatch of 0, but {PLANTED[name]}" in reason and "\n" not in reason, done.err
    assert "; start both from one" in reason or "; use one model" in reason or "; install the same" in reason
    assert read_rows(latest(tmp_path)) == read_rows(latest(tmp_path), "samples.jsonl") == []
