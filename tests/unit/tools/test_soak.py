"""The soak's own parts: what it kills when, and that it sees every difference that counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.processes import ROOT


def soak(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "checks" / "soak.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def write_run(folder: Path, rows: list[dict], files: dict[str, str]) -> Path:
    checkpoint = folder / "checkpoints" / "step_00002"
    checkpoint.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (checkpoint / "state.json").write_text(json.dumps({"files": files}))
    return folder


def test_the_same_seed_kills_the_same():
    first, again, other = (json.loads(soak("--plan", "--steps=200", "--kills=12", f"--seed={seed}").stdout) for seed in (3, 3, 4))
    assert first == again != other
    assert len({kill["step"] for kill in first}) == 12 and {kill["victim"] for kill in first} == {"engine", "trainer"}
    assert all(0 <= kill["step"] < 199 for kill in first) and first == sorted(first, key=lambda kill: kill["step"])


def test_only_times_and_restarts_may_differ(tmp_path):
    rows = [{"step": step, "loss": 0.5, "time/step": 1.0, "engine/restarts": 0, "tokens/per_second": 7} for step in range(2)]
    run = write_run(tmp_path / "run", rows, {"mcore/a": "12", "mcore/b": "34"})
    other_rows = [{**row, "time/step": 9.0, "engine/restarts": 1, "tokens/per_second": 8} for row in rows]
    same = soak("--compare", run, write_run(tmp_path / "same", other_rows, {"mcore/a": "12", "mcore/b": "34"}))
    assert (same.returncode, same.stdout) == (0, "rows and checkpoint are the same, bit for bit\n")
    other_rows[1] = {**other_rows[1], "loss": 0.25, "more": 1}
    other = soak("--compare", run, write_run(tmp_path / "other", other_rows, {"mcore/a": "12", "mcore/b": "35"}))
    assert (other.returncode, other.stdout.split("\n  ")[1:]) == (1, ["step 1: loss", "step 1: more", "checkpoint: mcore/b\n"])
    short = soak("--compare", run, write_run(tmp_path / "short", rows[:1], {}))
    assert short.stdout == "different:\n  2 rows and 1\n"
