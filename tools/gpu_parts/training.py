"""Runs of `megatron-rl train` for the parts `bridge` and `quickstart`, told from the files that a run writes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_parts.parts import SECONDS
from gpu_parts.rows import Rows

ROOT = Path(__file__).parents[2]
_LOG_LINES = 25
_SECONDS_TO_END = 10.0


def train(rows: Rows, what: str, settings: dict[str, Any]) -> None:
    """One run of configs/quickstart.toml with these settings in a folder of its own: a row for the run, one for each of its syncs."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {**settings, "model.path": f"{folder}/model", "log.dir": f"{folder}/runs"}
        overrides = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "megatron_rl", "train", str(ROOT / "configs" / "quickstart.toml"), *overrides]
        code = run_bounded(command, float(os.environ.get(SECONDS, "600")) - _SECONDS_TO_END)
        run = Path(folder, "runs", "latest")
        steps = read_steps(run / "metrics.jsonl")
        ended = "ended at the time limit" if code is None else f"exit code {code}"
        rows.add(what, f"{ended}, {max(len(steps) - 1, 0)} of {settings['train.steps']} steps", code == 0 and len(steps) > 1)
        for step in steps:
            tell(rows, what, step)
        if code != 0:
            for log in run.glob("*.log"):
                print(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-_LOG_LINES:]), flush=True)


def run_bounded(command: list[str], seconds: float) -> int | None:
    """Runs it in the repository's root; the exit code, or None where it had to be ended."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # the run ends its engine
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END / 2)
        process.kill()
        process.wait()
        return None


def read_steps(path: Path) -> list[dict[str, float]]:
    """The run's metrics, step by step; none where it wrote none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tell(rows: Rows, what: str, step: dict[str, float]) -> None:
    """One row for a step: that all tensors which the sync wrote were proved, and the mismatch where the step trained."""
    proved = step.get("sync/proved", 0)
    told = f"{proved:.0f} of {step.get('sync/tensors', 0):.0f} tensors proved, {step.get('sync/bytes', 0) / 1e6:.1f} MB"
    told += f", sync {step.get('time/sync', 0) * 1e3:.1f} ms, proof {step.get('time/proof', 0) * 1e3:.1f} ms"
    if "mismatch/abs_mean" in step:
        told += f"; |dlogp| mean {step['mismatch/abs_mean']:.3g}, largest {step['mismatch/abs_max']:.3g}"
    names = (
        "sync/bytes",
        "time/sync",
        "time/proof",
        "time/step",
        "mismatch/abs_mean",
        "mismatch/abs_max",
        "tokens/per_second",
        "eval/accuracy",
    )
    numbers = {name: step[name] for name in names if name in step}
    rows.add(f"{what}, step {step['step']:.0f}", told, 0 < proved == step.get("sync/tensors"), **numbers)
