"""The page that compares runs: results side by side, what differs in their settings, a line for each run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from unit.reporting.test_report import HOSTILE, Page, full_rows, make_run

from megatron_rl.cli.main import app
from megatron_rl.errors import UserError
from megatron_rl.reporting.comparison import write_comparison


def make_runs(parent: Path, **config: object) -> list[Path]:
    """Two runs of another learning rate; `config` are further fields of the second."""
    runs = []
    for number, name in enumerate(("first", "second")):
        (parent / name).mkdir()
        run = make_run(parent / name, [row | {"unix_time": 60.0 * row["step"]} for row in full_rows()])
        state = json.loads((run / "run.json").read_text())
        state["config"]["train"]["learning_rate"] = 1e-5 * (number + 1)
        state["config"] |= config if number else {}
        (run / "run.json").write_text(json.dumps(state))
        runs.append(run)
    return runs


def test_results_settings_and_curves_stand_side_by_side(tmp_path: Path):
    runs = make_runs(tmp_path)
    path = write_comparison(runs, None)
    page = Page(path)
    assert path == tmp_path / "comparison.html" and "2 runs: first, second" in page.text
    assert page.text.count("✓ finished") == 2 and page.text.count("40.0 % at first, best 80.0 %") == 2
    assert "train.learning_rate" in page.text and "2e-05" in page.text and "train.steps" not in page.text
    assert "Versions that differ" not in page.text and "Full config" not in page.text
    for plot in ("eval/accuracy", "eval/accuracy over time", "reward/mean", "mismatch/abs_mean", "time/step"):
        assert f"<code>{plot}</code>" in page.source, plot
    svg = page.source.split("<code>eval/accuracy</code>")[1].split("</svg>")[0]
    assert ">first<" in svg and ">second<" in svg
    assert all(target.startswith("#") for target in page.loads) and "script" not in page.tags


def test_hostile_settings_are_shown_not_obeyed(tmp_path: Path):
    page = Page(write_comparison(make_runs(tmp_path, name=HOSTILE), tmp_path / "page.html"))
    assert "script" not in page.tags and "<script>alert(1)</script>" in page.text


def test_a_run_that_has_just_begun_is_compared(tmp_path: Path):
    runs = make_runs(tmp_path)
    (runs[1] / "metrics.jsonl").write_text("")
    page = Page(write_comparison(runs, None))
    assert "eval/accuracy" in page.text and "not measured" in page.text


def test_mistakes_are_one_line(tmp_path: Path):
    first, second = make_runs(tmp_path)
    with pytest.raises(UserError, match="is named twice"):
        write_comparison([first, second, tmp_path / "x" / ".." / "first"], None)
    for arguments, line in (
        ([first, tmp_path], "holds no readable run.json"),
        ([first, second, "--output", tmp_path / "absent" / "page.html"], "--output"),
        ([first, "--output", "page.html"], "only applies to several runs"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert result.exit_code == 2 and line in result.stderr, result.output
    result = CliRunner().invoke(app, ["report", str(first), str(second)])
    assert result.exit_code == 0 and (tmp_path / "comparison.html").exists()


def test_a_profile_is_on_the_report(tmp_path: Path):
    run = make_run(tmp_path, full_rows())
    (run / "profile").mkdir()
    operator = {"name": "aten::<mm>", "calls": 7, "device_ms": 0.0, "host_ms": 12.345}
    profile = {"step": 2, "rank": 1, "micro_batches": 4, "operators": [operator]}
    (run / "profile" / "step_00002_rank_00001.json").write_text(json.dumps(profile))
    result = CliRunner().invoke(app, ["report", str(run)])
    page = Page(run / "report.html")
    assert result.exit_code == 0 and "Profile of step 2, rank 1" in page.text and "aten::<mm>" in page.text and "12.35" in page.text
    assert "profile/step_00002_rank_00001.trace.json.gz" in page.text
