"""tools/exactness.py reports that promised cells are 0."""

import json

import pytest
from support.processes import run_tool

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


CELLS = {
    "tree": ("qwen2,deepseek_v3", "fp8,fp8_kv", ["--train-tp", "1,2", "--ep", "1,2", "--rollout-tp", "2", "--rollout-ep", "1,2"], 20),
    "ranks": ("qwen2", "fp8_ranks,bf16_ranks", ["--train-tp", "1,2,4", "--ep", "1", "--rollout-tp", "1,2,4", "--rollout-ep", "1"], 18),
}


@pytest.mark.parametrize("order", CELLS)
def test_every_cell_of_some_layouts_is_zero(order, tmp_path):
    families, modes, layouts, count = CELLS[order]
    choice = ["--families", families, "--modes", modes, "--pp", "1", "--cp", "2", "--json", str(tmp_path / "cells.json")]
    done = run_tool("exactness", *layouts, *choice, seconds=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "cells.json").read_text())
    assert len(cells) == count and all(cell["largest"] == 0 and cell["tokens"] > 2000 for cell in cells)
    assert f"{count} of {count} promised cells are exactly 0" in done.stdout


def test_an_unknown_family_is_one_line(tmp_path):
    done = run_tool("exactness", "--families", "mamba", seconds=300)
    assert done.returncode == 2 and "--families = 'mamba': must be some of llama, " in done.stderr
