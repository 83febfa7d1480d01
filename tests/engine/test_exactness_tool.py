"""tools/exactness.py as a user runs it: promised cells are 0, and the exit code says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


def test_every_cell_of_some_layouts_is_zero(tmp_path):
    layouts = ["--train-tp", "1,2", "--pp", "1", "--cp", "2", "--ep", "1,2", "--rollout-tp", "2", "--rollout-ep", "1,2"]
    choice = ["--families", "qwen2,deepseek_v3", "--modes", "fp8,fp8_kv", "--json", str(tmp_path / "cells.json")]
    command = [sys.executable, str(ROOT / "tools" / "exactness.py"), *layouts, *choice]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "cells.json").read_text())
    assert len(cells) == 2 * (2 * 1 + 4 * 2) and all(cell["largest"] == 0 and cell["tokens"] > 2000 for cell in cells)
    assert f"{len(cells)} of {len(cells)} promised cells are exactly 0" in done.stdout


def test_an_unknown_family_is_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "exactness.py"), "--families", "mamba"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 2 and "--families = 'mamba': must be some of llama, " in done.stderr
