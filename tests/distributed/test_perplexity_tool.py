"""tools/perplexity.py: every mode scores the same tokens, and the modes differ by as much as expected."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from support import trainer
from support.models import make_checkpoint

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
TEXT = Path(trainer.__file__).parent / "held_out.txt"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "perplexity.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def test_every_mode_scores_the_same_tokens(tmp_path):
    model, result = make_checkpoint(tmp_path / "model"), tmp_path / "rows.json"
    done = run("--model", model, "--text", TEXT, "--tokens", 64, "--documents", 4, "--json", result)
    assert done.returncode == 0, done.stderr
    rows = {(row["mode"], row["high"]): row for row in json.loads(result.read_text())}
    modes = ["bf16", "fp8_unified", "fp8_rollout", "int8_rollout"]
    assert sorted(rows) == sorted((mode, high) for mode in ["transformers", *modes] for high in ("fp32", "bf16"))
    reference = rows["transformers", "fp32"]
    for row in rows.values():
        assert row["tokens"] == 4 * 63 and f"{row['perplexity']:.4f}" in done.stdout
        assert math.log(row["perplexity"] / reference["perplexity"]) == pytest.approx(row["nats_more"], abs=1e-9)
    assert reference["abs_max"] == 0 and rows["bf16", "fp32"]["abs_max"] < 1e-5
    assert rows["bf16", "bf16"]["abs_mean"] < 2 * rows["transformers", "bf16"]["abs_mean"]
    unified, rollout = rows["fp8_unified", "fp32"], rows["fp8_rollout", "fp32"]
    assert unified["perplexity"] == pytest.approx(rollout["perplexity"])  # the same blocks and inputs
    assert rows["bf16", "bf16"]["abs_mean"] < rows["int8_rollout", "fp32"]["abs_mean"] < unified["abs_mean"]


def test_a_text_that_cannot_be_read_is_one_line(tmp_path):
    done = run("--model", make_checkpoint(tmp_path / "model"), "--text", tmp_path / "absent.jsonl")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--text = " in done.stderr and "cannot be read" in done.stderr
