"""The benchmark compares like with like: every method computes the same log-probs, and only packed rows hold tokens alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench" / "packing.py"


@pytest.mark.long
def test_all_methods_compute_the_same(tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"solution": "x" * length}) + "\n" for length in (9, 60, 150)))
    small = ["--count=6", "--rows=3", "--layers=1", "--repeat=1", "--precision=fp32", f"--json={tmp_path / 'report.json'}"]
    command = [sys.executable, str(TOOL), f"--lengths={texts}", "--field=solution", *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["answers"]) <= {3, 20, 50} and len(report["answers"]) == 6
    packed, *others = report["ways"].values()
    assert packed["padding"] == 0 and packed["times_packed"] == 1
    for method in others:
        assert method["padding"] > 0 and method["logprobs_apart"] < 1e-5 and method["seconds"] > 0
        assert f"{method['seconds']:8.3f} s" in done.stdout
