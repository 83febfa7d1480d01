"""Compare whole training runs side by side: generation one version ahead against in turns, and 1, 2, 4 trainer ranks.

    python tools/studies/training_runs.py ahead [--steps 12] [--rounds 2] [--folder DIR] [--section.key=value ...]
    python tools/studies/training_runs.py scaling [--ranks 1,2,4] [--share dp] [--steps 6] [--rounds 2] [--folder DIR]
        [--section.key=value ...]

Every round makes one run of each variant, in processes of their own with an engine of their own; rounds follow each other, so that a busy
machine slows all variants alike. All other options go to the runs, whose configuration is configs/quickstart.toml without evaluation.
`--read` makes no run: it prints the table of those that are below --folder.
"""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import common
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.errors import RunError
from megatron_rl.observability.run_log import read_metrics

COMMON = {"data.eval_every": 1000, "data.eval_size": 8, "checkpoint.resume": "never"}
SCHEDULES: dict[str, dict[str, object]] = {
    "in turns": {"placement.kind": "disaggregated"},
    "one ahead": {"placement.kind": "disaggregated", "placement.max_staleness": 1, "sync.running": "continue"},
}
SCHEDULE_METRICS = {"time/step": "step", "time/generate": "waited", "time/train": "trained", "staleness/mean": "mean age"}
Times = dict[str, float]
"""Median seconds of a step: `step`, and its parts `trainer`, `generate`, `sync` and `proof`, which is a part of `sync`."""
Read = Annotated[bool, typer.Option("--read", help="Read the runs below --folder instead of making them.")]


def measure_run(folder: Path, settings: Mapping[str, object], others: Sequence[str], ranks: int, read: bool) -> list[dict[str, Any]]:
    """Make a run of the quickstart on `ranks` trainer ranks below `folder` and return its metrics rows.

    Raises RunError where it breaks; its messages go to the console.
    """
    options = [f"--{name}={value}" for name, value in {**COMMON, **settings, "log.dir": folder}.items()]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    process = {"stdout": subprocess.DEVNULL, "env": {"OMP_NUM_THREADS": "1", **os.environ}}
    if not read and (code := common.train(Path("configs/quickstart.toml"), [*options, *others], launcher, **process)):
        raise RunError(f"the run below {folder} ended with exit code {code}")
    return read_metrics(folder / "latest")


def ahead(context: typer.Context, steps: int = 12, rounds: int = 2, folder: Path = Path("runs/bench-async"), read: Read = False) -> None:
    """Measure what generating one version ahead saves.

    Medians are over all steps but the first and the last of a run: the first has nothing ahead of it, the last nothing to make ahead.
    """
    folder = folder.resolve()
    values: dict[str, dict[str, list[float]]] = {kind: {metric: [] for metric in SCHEDULE_METRICS} for kind in SCHEDULES}
    for number in range(rounds):
        for kind, schedule in SCHEDULES.items():
            settings = {"algorithm.correction": "tis", **schedule, "train.steps": steps, "model.path": folder / "model"}
            rows = measure_run(folder / f"{kind.replace(' ', '-')}-{number}", settings, context.args, 1, read)
            for metric, samples in values[kind].items():
                samples += [row[metric] for row in rows[2:-1] if metric in row]
    typer.echo(f"{_machine()}; medians of {len(values['in turns']['time/step'])} steps each")
    for kind, metrics in values.items():
        parts = [f"{label} {statistics.median(metrics[metric]):.2f}" for metric, label in SCHEDULE_METRICS.items() if metrics[metric]]
        typer.echo(f"{kind:10} {', '.join(parts)}")
    in_turns, one_ahead = (statistics.median(values[kind]["time/step"]) for kind in SCHEDULES)
    typer.echo(f"one ahead is {in_turns / one_ahead:.2f} times as fast")


def scaling(
    context: typer.Context,
    ranks: str = "1,2,4",
    share: Annotated[Literal["dp", "tp", "pp", "cp"], typer.Option(help="What the ranks share, of train.layout.")] = "dp",
    steps: int = 6,
    rounds: int = 2,
    prompts_per_rank: Annotated[int, typer.Option(help="Problems per rank of weak scaling.")] = 16,
    folder: Path = Path("runs/bench-scaling"),
    read: Read = False,
) -> None:
    """Measure how a run scales over trainer ranks, with the sync's share.

    Strong: the quickstart's batch whatever the number of ranks. Weak: --prompts-per-rank problems for each. Medians are over all steps but
    a run's first. Log-probs and training are what the ranks share; one engine generates in every case.
    """
    folder, counts = folder.resolve(), [int(count) for count in ranks.split(",")]
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(rounds):
        for kind, count in ((kind, count) for kind in ("strong", "weak") for count in counts):
            settings = {"train.steps": steps, f"train.layout.{share}": count, "model.path": folder / "model"}
            if kind == "weak":
                settings["rollout.prompts_per_step"] = prompts_per_rank * count
            metrics = measure_run(folder / f"{kind}-{count}-{number}", settings, context.args, count, read)
            rows.setdefault((kind, count), []).extend([row for row in metrics if "time/step" in row][1:])
    typer.echo(f"ranks share {share}; {_machine()}")
    for kind in ("strong", "weak"):
        typer.echo(format_scaling_table(kind, {count: compute_medians(rows[kind, count]) for count in counts}))


def _machine() -> str:
    return f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"


def compute_medians(rows: list[dict[str, Any]]) -> Times:
    """Return the medians over steps."""
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


def format_scaling_table(kind: str, medians: dict[int, Times]) -> str:
    """Format a Markdown table with a line per number of ranks.

    Strong scaling's speed-up is that of the same batch, weak scaling's that of problems per second; both against the fewest ranks.
    """
    fewest = min(medians)
    lines = [
        f"| {kind}: ranks | step, s | trainer, s | its speed-up | the step's | generate, s | sync, s | its share | the proof's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for count, times in medians.items():
        work = count / fewest if kind == "weak" else 1.0
        trainer, step = (work * medians[fewest][part] / times[part] for part in ("trainer", "step"))
        sync, proof = (100 * times[part] / times["step"] for part in ("sync", "proof"))
        lines.append(
            f"| {count} | {times['step']:.2f} | {times['trainer']:.2f} | {trainer:.2f} | {step:.2f} | {times['generate']:.2f} "
            f"| {times['sync']:.3f} | {sync:.1f} % | {proof:.1f} % |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run_script(ahead, scaling)
