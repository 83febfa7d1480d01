"""A run that stops because its engine differs says where; `megatron-rl locate` walks a config's model and a run's checkpoint."""

import json
import os

import planted_tensors
import pytest
from support.processes import ROOT, Command
from support.train_command import TINY, finish, latest, make_model, read_json

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


def test_a_run_that_the_canary_stops_names_the_operator_and_its_checkpoint_has_no_difference(tmp_path, monkeypatch):
    fault, report = tmp_path / "fault", tmp_path / "report.json"
    monkeypatch.setenv(planted_tensors.FILE_VARIABLE, str(fault))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engine"))))
    planted_tensors.set_fault(fault, {"path": "cache", "layer": 0})
    arguments = make_model(tmp_path, TINY | {"model.path": tmp_path / "model", "log.dir": tmp_path / "runs"})
    done = finish(Command(tmp_path / "train", "planted_run", "train", *arguments))
    run = latest(tmp_path)
    assert done.code == 3 and "the canary fails: engine 0, prompt 0" in done.err, done.err
    assert read_json(run / "run.json")["reason"].startswith("the canary fails:")
    located = read_json(run / "locate.json")
    assert (located["operator"], located["cause"]) == ("layers.0.attention.core", "KV cache")
    assert located["first"]["phase"] == "decoding" and located["first"]["element"]["differing"] > 0
    assert "layers.0.attention.core is the first operator that differs" in (run / "run.log").read_text()
    planted_tensors.set_fault(fault)
    done = finish(Command(tmp_path / "locate", "planted_run", "locate", run, "--prompt", "1 + 1 = 2", "--json", report))
    assert done.code == 0 and done.out.startswith("No operator differs:"), done.err
    assert json.loads(report.read_text())["prompt_tokens"] == len("1 + 1 = 2")
    planted_tensors.set_fault(fault, {"path": "cache", "layer": 0})  # a wrong weight would be overwritten by the sync
    done = finish(Command(tmp_path / "config", "planted_run", "locate", *arguments))
    assert done.code == 1 and done.out.startswith("layers.0.attention.core is the first operator that differs"), done.out + done.err
