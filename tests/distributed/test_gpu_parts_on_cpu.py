"""The parts of tools/gpu_check.py that compute with a whole layer or sync, on a CPU: all of them but the kernels and CUDA IPC."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu_parts.rows import read_rows

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from pathlib import Path

import torch.distributed as dist
from gpu_parts import layer, speed_layer, speed_sync
from gpu_parts.rows import Rows
from megatron_rl.config import ArchitectureConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.mcore.model import start_megatron, stop_megatron
from parallel.layout import Layout

rows, tiny = Rows(Path(sys.argv[1])), ArchitectureConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
start_megatron(Layout(), seed=0)
layer.check(rows, ["emulated"], tiny, tokens=64)
speed_layer.measure(rows, "tiny layer", tiny, ["emulated"], tokens=64, repeat=1)
stop_megatron()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
speed_sync.measure(rows, "tiny", [SyncConfig(transport="shared_memory", proof="streamed", timeout=60.0)], "cpu", repeat=1)
dist.destroy_process_group()
"""


def test_layer_and_sync_parts_compute(tmp_path):
    path = os.pathsep.join((str(ROOT), str(ROOT / "tools")))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "rows")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row.what: row for row in read_rows(tmp_path / "rows")}
    assert all(row.ok is not False for row in rows.values()), rows
    for scale_format in ("pow2", "fp32"):  # a back end against itself: the same bits, forward and backward
        assert rows[f"emulated, {scale_format}: log-probs"].found == "the same 32 values, bit by bit"
        furthest = next(row for what, row in rows.items() if what.startswith(f"emulated, {scale_format}: the furthest of 11 gradients"))
        assert furthest.numbers["relative_l2"] == 0
    for what in ("forward", "step"):
        assert rows[f"tiny layer {what}, emulated"].numbers["seconds"] > 0 and rows[f"tiny layer {what}, bf16"].numbers["of_bf16"] == 1
    sync = "shared_memory, model tiny, bucket_mb 256"
    for case in ("sync without its proof", "sync with the streamed proof", "copy on the device", "gather, convert, quantise"):
        assert rows[f"{sync}: {case}"].numbers["bytes"] > 10e6
    assert rows[f"{sync}: sync without its proof"].numbers["to_beat"] == 0.8
    assert rows[f"{sync}: the proof's share"].numbers["share"] < 1
