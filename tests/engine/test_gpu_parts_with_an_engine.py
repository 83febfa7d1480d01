"""The parts of tools/gpu_check.py that ask a live engine, with a real SGLang and a tiny model on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_parts.rows import read_rows

ROOT = Path(__file__).parents[2]
PHASES = ("rollout", "reference forward", "actor forward", "actor update", "sync", "whole step")

PROGRAM = """
import sys
from pathlib import Path

from gpu_parts import speed_decode, speed_step
from gpu_parts.rows import Rows
from gpu_parts.side_by_side import started, those_up
from megatron_rl.config import ArchitectureConfig, PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.mcore.model import start_megatron, stop_megatron
from parallel.layout import Layout

rows, folder = Rows(Path(sys.argv[1], "rows")), Path(sys.argv[1])
tiny = ArchitectureConfig(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
rollout = {"max_running_requests": 8, "max_total_tokens": 2048, "start_timeout": 300.0, "request_timeout": 100.0}
precisions = {"fp8": PrecisionConfig()}
start_megatron(Layout(), seed=0)
with started(folder, tiny, precisions, rollout, (4,)) as engines:
    settings = SyncConfig(transport="shared_memory", proof="streamed", timeout=60.0)
    runs = {name: speed_step.OneRun(tiny, precisions[name], engine, settings) for name, engine in engines.items()}
    up = those_up(rows, engines)
    speed_decode.measure(rows, "tiny", up, (1, 4), tokens=12, repeat=1)
    speed_step.measure(rows, runs, (4, 8, 12), repeat=1)
stop_megatron()
"""


@pytest.mark.slow
def test_decoding_and_rl_steps_are_measured(tmp_path):
    path = os.pathsep.join((str(ROOT), str(ROOT / "tools")))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.what: row for row in read_rows(tmp_path / "rows")}
    assert all(row.ok is not False for row in rows.values()), rows
    for batch in (1, 4):
        assert rows[f"tiny decoding {batch} at once, fp8"].numbers["tokens_per_second"] > 0
    assert rows["first sync, fp8"].ok
    phases = {name: rows[f"RL step: {name}, fp8"].numbers["seconds"] for name in PHASES}
    whole = phases.pop("whole step")
    assert whole == pytest.approx(sum(phases.values())) and min(phases.values()) > 0
    assert rows["engine against trainer, fp8"].numbers["abs_mean"] == 0  # one policy, to the bit
