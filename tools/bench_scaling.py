"""Measures how a run scales over trainer ranks: the same run on 1, 2 and 4 of them, strong and weak, with the sync's share; prints tables.

    python tools/bench_scaling.py [--ranks 1,2,4] [--share dp] [--steps 6] [--rounds 2] [--folder DIR] [--section.key=value ...]

Strong: the quickstart's batch whatever the number of ranks. Weak: `--prompts-per-rank` problems for each. `--share` says what the ranks
share: dp, tp, pp or cp of `train.layout`. Every round makes each run once, in processes of their own with its engine, so that a busy
machine slows all of them; medians are over all steps but a run's first. Log-probs and training are what the ranks share; one engine
generates in every case. All other options go to the runs, whose configuration is configs/quickstart.toml without evaluation.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import typer
from study import measure_run, parse_names, run_cli

COMMON = {"data.eval_every": 1000, "data.eval_size": 8, "checkpoint.resume": "never"}
Times = dict[str, float]
"""Median seconds of a step: `step`, and its parts `trainer`, `generate`, `sync` and `proof`, which is a part of `sync`."""


def main(
    context: typer.Context,
    ranks: str = "1,2,4",
    share: str = "dp",
    steps: int = 6,
    rounds: int = 2,
    prompts_per_rank: int = 16,
    folder: Path = Path("runs/bench-scaling"),
) -> None:
    """Measures and prints."""
    parse_names(share, ("dp", "tp", "pp", "cp"), "--share")
    folder, counts = folder.resolve(), [int(count) for count in ranks.split(",")]
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(rounds):
        for kind, count in ((kind, count) for kind in ("strong", "weak") for count in counts):
            own = {"train.steps": steps, "train.layout." + share: count, "model.path": folder / "model"}
            own |= {"rollout.prompts_per_step": prompts_per_rank * count} if kind == "weak" else {}
            found = measure_run(folder / f"{kind}-{count}-{number}", {**COMMON, **own}, context.args, count)
            rows.setdefault((kind, count), []).extend([row for row in found if "time/step" in row][1:])
    typer.echo(f"ranks share {share}; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    for kind in ("strong", "weak"):
        typer.echo(table(kind, {count: medians(rows[kind, count]) for count in counts}))


def medians(rows: list[dict[str, Any]]) -> Times:
    """Over steps."""
    times = [
        {
            "step": row["time/step"],
            "trainer": row["time/logprobs"] + row["time/train"],
            "generate": row["time/generate"],
            "sync": row["time/sync"] + row["time/proof"],
            "proof": row["time/proof"],
        }
        for row in rows
    ]
    return {name: statistics.median(time[name] for time in times) for name in times[0]}


def table(kind: str, found: dict[int, Times]) -> str:
    """In Markdown. The speed-up of strong scaling is that of the same batch, weak scaling's that of problems per second; both against the
    first line's number of ranks."""
    first = min(found)
    lines = [
        f"| {kind}: ranks | step, s | trainer, s | its speed-up | the step's | generate, s | sync, s | its share | the proof's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for count, times in found.items():
        work = count / first if kind == "weak" else 1.0
        parts = [work * found[first][part] / times[part] for part in ("trainer", "step")]
        shares = [100 * times[part] / times["step"] for part in ("sync", "proof")]
        lines.append(
            f"| {count} | {times['step']:.2f} | {times['trainer']:.2f} | {parts[0]:.2f} | {parts[1]:.2f} | {times['generate']:.2f} "
            f"| {times['sync']:.3f} | {shares[0]:.1f} % | {shares[1]:.1f} % |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_cli(main)
