"""The soak's own parts: what it kills when, and that it sees every difference that counts."""

from __future__ import annotations

import json
from pathlib import Path

import soak


def finished(folder: Path, rows: list[dict], files: dict[str, str]) -> Path:
    checkpoint = folder / "checkpoints" / "step_00002"
    checkpoint.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (checkpoint / "state.json").write_text(json.dumps({"files": files}))
    return folder


def test_the_same_seed_kills_the_same(tmp_path):
    kills = soak.plan(200, 12, 3)
    assert kills == soak.plan(200, 12, 3) != soak.plan(200, 12, 4)
    assert len({kill.step for kill in kills}) == 12 and {kill.victim for kill in kills} == {"engine", "trainer"}
    assert all(0 <= kill.step < 199 for kill in kills) and kills == sorted(kills, key=lambda kill: kill.step)


def test_only_times_and_restarts_may_differ(tmp_path):
    rows = [{"step": step, "loss": 0.5, "time/step": 1.0, "engine/restarts": 0, "tokens/per_second": 7} for step in range(2)]
    one = finished(tmp_path / "one", rows, {"mcore/a": "12", "mcore/b": "34"})
    other = [{**row, "time/step": 9.0, "engine/restarts": 1, "tokens/per_second": 8} for row in rows]
    assert soak.differences(one, finished(tmp_path / "same", other, {"mcore/a": "12", "mcore/b": "34"})) == []
    other[1] = {**other[1], "loss": 0.25, "more": 1}
    found = soak.differences(one, finished(tmp_path / "other", other, {"mcore/a": "12", "mcore/b": "35"}))
    assert found == ["step 1: loss", "step 1: more", "checkpoint: mcore/b"]
    assert soak.differences(one, finished(tmp_path / "short", rows[:1], {})) == ["2 rows and 1"]
