"""The benchmark compares like with like: every way computes the same log-probs, and only packed rows hold tokens alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "bench_packing.py"


def test_all_ways_compute_the_same(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"solution": "x" * length}) + "\n" for length in (9, 60, 150)))
    small = ["--count=6", "--rows=3", "--layers=1", "--repeat=1", "--precision=fp32", f"--json={tmp_path / 'found.json'}"]
    command = [sys.executable, str(TOOL), f"--lengths={texts}", "--field=solution", *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["answers"]) <= {3, 20, 50} and len(found["answers"]) == 6
    packed, *others = found["ways"].values()
    assert packed["padding"] == 0 and packed["times_packed"] == 1
    for way in others:
        assert way["padding"] > 0 and way["logprobs_apart"] < 1e-5 and way["seconds"] > 0
        assert f"{way['seconds']:8.3f} s" in done.stdout
