"""tools/exactness.py reports that promised cells are 0."""

import json

import pytest
from support.processes import run_tool

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


def test_every_cell_of_some_layouts_is_zero(tmp_path):
    layouts = ["--train-tp", "1,2", "--pp", "1", "--cp", "2", "--ep", "1,2", "--rollout-tp", "2", "--rollout-ep", "1,2"]
    choice = ["--families", "qwen2,deepseek_v3", "--modes", "fp8,fp8_kv", "--json", str(tmp_path / "cells.json")]
    done = run_tool("exactness", *layouts, *choice, seconds=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "cells.json").read_text())
    assert len(cells) == 2 * (2 * 1 + 4 * 2) and all(cell["largest"] == 0 and cell["tokens"] > 2000 for cell in cells)
    assert f"{len(cells)} of {len(cells)} promised cells are exactly 0" in done.stdout


def test_an_unknown_family_is_one_line(tmp_path):
    done = run_tool("exactness", "--families", "mamba", seconds=300)
    assert done.returncode == 2 and "--families = 'mamba': must be some of llama, " in done.stderr
