"""The live view: it reads on where it stopped, follows a resumed run, and says what no rank says any more."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from unit.reporting.test_report import full_rows, make_run

from megatron_rl.cli.main import app
from megatron_rl.cli.watch import RunView, draw_curve


def show(view: RunView) -> str:
    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the console)
    console.print(view.draw())
    return console.export_text()


def write_rank(run: Path, rank: int, phase: str, age: float = 0.0) -> None:
    (run / "ranks").mkdir(exist_ok=True)
    status = {"rank": rank, "host": "node", "pid": 1, "phase": phase, "step": 2, "seconds": 3.0, "limit": 0.0, "noted": False}
    path = run / "ranks" / f"rank_{rank:05d}.json"
    path.write_text(json.dumps(status))
    os.utime(path, (time.time() - age,) * 2)


def test_a_view_has_progress_ranks_metrics_and_the_log(tmp_path: Path):
    run = make_run(tmp_path, full_rows(), "running")
    (run / "run.log").write_text("\n".join(f"line {number}" for number in range(20)) + "\n\x1b[2Jred")
    write_rank(run, 0, "train")
    write_rank(run, 1, "train")
    text = show(RunView(run))
    assert "running" in text and "step 2 of 2" in text and "3.50 s a step" in text
    assert "ranks 0-1: in train of step 2" in text.replace("rank 0-1", "ranks 0-1") and "4/4 tensors, proof ok" in text
    assert "reward/mean" in text and "mean reward of the sampled completions" in text and "line 19" in text and "line 2\n" not in text
    assert "\\x1b[2Jred" in text, "what a log holds cannot clear the screen"


def test_it_reads_on_and_follows_a_resumed_run(tmp_path: Path):
    run = make_run(tmp_path, full_rows()[:2], "running")
    view = RunView(run)
    assert "step 1 of 2" in show(view)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "reward/mean": 0.75}) + '\n{"step": 3, "rew')
        file.flush()
        assert "step 2 of 2" in show(view) and "0.75" in show(view), "the torn line is not read before it is whole"
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.125}) + "\n")
    text = show(view)
    assert "step 1 of 2" in text and "0.125" in text and "0.75" not in text


def test_silence_is_said(tmp_path: Path):
    run = make_run(tmp_path, full_rows()[:2], "running")
    write_rank(run, 0, "sync", age=3600)
    assert "no rank was heard for 1 h 00 min" in show(RunView(run))
    write_rank(run, 1, "train")
    text = show(RunView(run))
    assert "no rank was heard" not in text and "rank 0: in sync of step 2, not heard for 36" in text


def test_the_command_ends_with_the_run_and_refuses_what_is_no_run(tmp_path: Path):
    run = make_run(tmp_path, full_rows(), "broken", "engine died: signal 9")
    for options in (["--once"], ["--every", "0.1"]):
        result = CliRunner().invoke(app, ["watch", str(run), *options])
        assert result.exit_code == 0 and "broken" in result.stdout and "engine died" in result.stdout
    result = CliRunner().invoke(app, ["watch", str(tmp_path / "absent")])
    assert result.exit_code == 2 and "RUN_DIR" in result.stderr


@pytest.mark.parametrize(
    "values, curve", [([], ""), ([1.0], "▁"), ([0.0, 0.5, 1.0], "▁▅█"), ([2.0, None, 1.0], "█ ▁"), (list(range(80)), None)]
)
def test_curves(values: list, curve: str | None):
    drawn = draw_curve(values)
    assert drawn == curve if curve is not None else len(drawn) == 40 and drawn == "".join(sorted(drawn))
