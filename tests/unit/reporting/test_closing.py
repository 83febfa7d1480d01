"""The three lines that end a run's console output."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from megatron_rl.reporting.closing import closing_lines

SYNC = {"sync/tensors": 27, "sync/proved": 27}


def end_run(folder: Path, *rows: dict[str, object]) -> str:
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)))
    return closing_lines(folder)[0]


@pytest.mark.parametrize("rows, line", [
    ([{"eval/accuracy": 0.57, **SYNC}, {"mismatch/abs_max": 0.0, **SYNC}, {"eval/accuracy": 0.98, "mismatch/abs_max": 0.0, **SYNC}],
     "Held-out accuracy rose from 57.0 % to 98.0 % over 2 steps; largest mismatch of trainer and engine 0 nats; "
     "81 of 81 tensors proved equal in 3 syncs"),
    ([SYNC, {"mismatch/abs_max": 0.22, "sync/tensors": 27}],
     "No held-out accuracy was measured in 1 step; largest mismatch of trainer and engine 0.22 nats; "
     "27 of 54 tensors proved equal in 2 syncs"),
    ([{"mismatch/abs_max": None}], "No held-out accuracy was measured in 0 steps; largest mismatch of trainer and engine not finite"),
    ([], "No step was recorded"),
])  # fmt: skip
def test_the_result_is_said_as_far_as_it_was_measured(tmp_path, rows, line):
    assert end_run(tmp_path, *rows) == f"result: {line}"


def test_the_last_checkpoint_is_exported_next(tmp_path):
    folder = tmp_path / "my run"
    for step in (5, 10):
        (folder / "checkpoints" / f"step_{step:05}").mkdir(parents=True)
    end_run(folder, {})
    _, report, following = closing_lines(folder)
    assert report == f"report: none, see {folder}"
    program, *words = shlex.split(following.removeprefix("next:   "), comments=True)
    assert program in (sys.executable, str(Path(sys.executable).with_name("megatron-rl")), ".venv/bin/megatron-rl")
    assert words[-5:] == ["export", "--checkpoint", str(folder / "checkpoints" / "step_00010"), "--output", str(folder / "hf")]
