"""The study goes on where it was: finished runs are read, not made again; and its page shows each of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def study(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "algorithm_study.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


def run_folder(parent: Path, scores: list[float], steps: int) -> None:
    folder = parent / "2026-01-01_00-00-00"
    folder.mkdir(parents=True)
    (parent / "latest").symlink_to(folder.name)
    (folder / "run.json").write_text(json.dumps({"status": "finished", "config": {"train": {"steps": steps}}}))
    rows = [{"step": step, "eval/accuracy": score, "entropy": 1.0} for step, score in enumerate(scores)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_finished_runs_make_a_page_without_training(tmp_path):
    run_folder(tmp_path / "grpo", [0.25, 0.75, 0.5], 2)
    run_folder(tmp_path / "gspo", [0.25, 0.125, 0.625], 2)
    done = study("--algorithms", "grpo,gspo", "--steps", "2", "--out", str(tmp_path), "--train.seed=1")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "study.html").read_text()
    assert "<td>grpo</td><td>2</td><td>25.0 %</td><td>75.0 %</td><td>50.0 %</td>" in page
    assert "<td>gspo</td><td>2</td><td>25.0 %</td><td>62.5 %</td><td>62.5 %</td>" in page
    assert page.count("<svg ") == 2 and "--train.seed=1" in page


def test_a_run_of_another_length_is_made_anew(tmp_path):
    """What is asked of the command that trains is seen by its refusal of a config that is not there."""
    run_folder(tmp_path / "dapo", [0.5], 2)
    done = study("--algorithms", "dapo", "--steps", "3", "--out", str(tmp_path), "--config", "absent.toml")
    assert done.returncode == 2 and "absent.toml" in done.stderr


def test_an_unknown_algorithm_is_refused(tmp_path):
    done = study("--algorithms", "grpo,gppo", "--out", str(tmp_path))
    assert done.returncode == 2 and "gppo" in done.stderr and not any(tmp_path.iterdir())
