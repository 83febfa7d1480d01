"""Plugs that try to end `megatron-rl train` in real runs: no run ends with exit code 0 or 1 because of them, and no process is left."""

import os

import pytest
from support import train_command
from support.misbehaving import VARIABLE
from support.processes import ROOT, alive_after, family, until

LOSS, TRACKER = "support.misbehaving:loss", "support.misbehaving:Tracker"
TESTS = str(ROOT / "tests")


def run(folder, changes, monkeypatch, misdeed=""):
    """Run the command to its end. Return how it ended, and the processes of the run that are left."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TESTS, str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(VARIABLE, misdeed)
    seen = set()
    with train_command.train(folder, changes) as command:
        until(lambda: seen.update(family(command.pid)) or command.ended(), train_command.LONG, "the end of the run")
        done = command.wait(60)
    return done, alive_after(seen, 60)


@pytest.mark.timeout(3000)
def test_a_module_that_ends_the_process_is_refused_before_a_run_folder_exists(tmp_path, monkeypatch):
    (tmp_path / "a_script.py").write_text("import sys\nsys.exit(0)")
    done, left = run(tmp_path, {"algorithm.loss": "a_script:loss"}, monkeypatch)
    line = "megatron-rl: algorithm.loss = 'a_script:loss': cannot be imported (SystemExit: 0); use one of ppo, "
    assert (done.code, left) == (2, []) and done.err.splitlines()[-1].startswith(line)
    assert "Traceback" not in done.err and not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_tracker_that_fails_and_a_loss_that_ends_the_process_during_a_run(tmp_path, monkeypatch):
    changes = {"algorithm.loss": LOSS, "algorithm.loss_settings": '{misdeed = "calls sys.exit", after = 2}'}
    changes["log.trackers"] = f'["{TRACKER}"]'
    done, left = run(tmp_path, changes, monkeypatch, "raises")
    assert f"tracker {TRACKER} failed, the run continues (ValueError: two lines)" in done.out
    (line,) = [line for line in done.err.splitlines() if line.startswith("megatron-rl: ")]
    assert line.startswith(f"megatron-rl: algorithm.loss = {LOSS!r}: fails (SystemExit: 0, misbehaving.py line ")
    assert done.code == 3 and "Traceback" not in done.err and left == []
    record = train_command.read_json(train_command.latest(tmp_path) / "run.json")
    assert record["status"] == "broken" and "SystemExit: 0" in record["reason"]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_data_source_that_exits_and_a_loss_of_nan_during_a_run(tmp_path, monkeypatch):
    source = "support.misbehaving:Generator"
    changes = {"data.train": source, "data.eval": source, "data.settings": "{start = 64}", "rollout.prompts_per_step": 48}
    done, left = run(tmp_path / "source", changes, monkeypatch, "calls sys.exit")
    assert (done.code, left) == (3, []) and "Traceback" not in done.err
    assert "megatron-rl: data.train = 'support.misbehaving:Generator': fails (SystemExit: 0, misbehaving.py line " in done.err
    changes = {"algorithm.loss": LOSS, "algorithm.loss_settings": '{misdeed = "nan", after = 2}'}
    done, left = run(tmp_path / "nan", changes, monkeypatch)
    assert (done.code, left) == (3, []) and f"is nan; the loss is algorithm.loss = '{LOSS}'" in done.err
