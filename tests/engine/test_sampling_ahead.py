"""Runs whose tokens are all older than the trainer's weights: the newest version is compared with the engine in every step."""

import os

import planted_server
import pytest
from support import train_command
from support.processes import ROOT
from support.train_command import finish, latest, read_json, read_rows, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
AHEAD = {
    "placement.kind": "disaggregated", "placement.max_staleness": 1, "algorithm.correction": "tis", "rollout.max_new_tokens": 24,
    "data.eval_every": 1000, "data.eval_size": 1,
}  # fmt: skip

ALTERNATING = {"rollout.max_new_tokens": 24, "data.eval_every": 1000, "data.eval_size": 1}


def test_every_step_compares_tokens_of_the_trainers_version(tmp_path):
    assert (done := finish(train(tmp_path, AHEAD | {"train.steps": 8}))).code == 0, done.err
    rows = read_rows(latest(tmp_path))[1:]
    assert all(row["mismatch/tokens"] > 0 and row.get("mismatch/abs_max", 0.0) == 0.0 for row in rows)
    stale = [row for row in rows if row["staleness/share"] == 1.0]
    assert stale and all(row["time/compare"] > 0 for row in stale) and all("time/compare" not in row for row in rows if row not in stale)
    assert all("mismatch/abs_max" not in row for row in stale), "they have asked the canary"


@pytest.mark.parametrize("changes", [AHEAD, ALTERNATING], ids=["ahead", "alternating"])
def test_an_engine_whose_weight_changes_after_the_proof_ends_the_run(tmp_path, monkeypatch, changes):
    fault = tmp_path / "fault"
    monkeypatch.setenv(planted_server.FILE_VARIABLE, str(fault))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "engine"))))
    with train(tmp_path, changes | {"train.steps": 500}, module="planted_run") as command:
        train_command.wait_for_rows(command, tmp_path, 3)  # from the second step on, tokens are older than the trainer's weights
        planted_server.set_fault(fault, "changed weight")
        done = command.wait(train_command.LONG)
    assert done.code == 3, done.err
    reason = read_json(latest(tmp_path) / "run.json")["reason"]
    assert reason.startswith(("the mismatch of rollout and trainer is", "the canary fails:")) and reason in done.err
    assert any("time/compare" in row for row in read_rows(latest(tmp_path))) == (changes is AHEAD)
