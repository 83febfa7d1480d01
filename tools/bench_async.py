"""Measures what generating ahead saves: the same run in turns and one version ahead, step by step of the clock; prints the ratio.

    python tools/bench_async.py [--steps 12] [--rounds 2] [--folder runs/bench-async] [--rollout.group_size=4 ...]

Every round makes one run of each kind, in processes of their own, with its engine; rounds follow each other, so that a busy machine slows
both. Medians are over all steps but the first and the last of a run: the first has nothing ahead of it, the last nothing to make ahead.
All other options go to the runs, whose configuration is configs/quickstart.toml without evaluation.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import typer
from study import measure_run, run_cli

COMMON = {"data.eval_every": 1000, "data.eval_size": 8, "checkpoint.resume": "never", "algorithm.correction": "tis"}
KINDS = {
    "in turns": {"placement.kind": "disaggregated"},
    "one ahead": {"placement.kind": "disaggregated", "placement.max_staleness": 1, "sync.running": "continue"},
}
SHOWN = {"time/step": "step", "time/generate": "waited", "time/train": "trained", "staleness/mean": "mean age"}


def main(context: typer.Context, steps: int = 12, rounds: int = 2, folder: Path = Path("runs/bench-async")) -> None:
    """Measures and prints."""
    folder = folder.resolve()
    found: dict[str, dict[str, list[float]]] = {kind: {metric: [] for metric in SHOWN} for kind in KINDS}
    for number in range(rounds):
        for kind, own in KINDS.items():
            settings = {**COMMON, **own, "train.steps": steps, "model.path": folder / "model"}
            rows = measure_run(folder / f"{kind.replace(' ', '-')}-{number}", settings, context.args)
            for metric, values in found[kind].items():
                values += [row[metric] for row in rows[2:-1] if metric in row]
    typer.echo(
        f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; medians of {len(found['in turns']['time/step'])} steps each"
    )
    for kind, values in found.items():
        told = [f"{label} {statistics.median(values[metric]):.2f}" for metric, label in SHOWN.items() if values[metric]]
        typer.echo(f"{kind:10} {', '.join(told)}")
    before, after = (statistics.median(found[kind]["time/step"]) for kind in KINDS)
    typer.echo(f"one ahead is {before / after:.2f} times as fast")


if __name__ == "__main__":
    run_cli(main)
