"""Draw the accuracy of runs as one SVG for a page such as the README, on light and on dark ground.

    python tools/studies/plot_runs.py docs/results/smollm2.svg runs/smollm2/seed0/latest runs/smollm2/seed1/latest

Each run has a line of its held-out accuracy and a line of its training accuracy, named by its seed.
"""

from __future__ import annotations

from pathlib import Path

import typer
from common import merge_rows

from megatron_rl.cli.main import run_script
from megatron_rl.errors import UserError
from megatron_rl.observability.run_log import read_metrics, read_run
from megatron_rl.reporting import plots
from megatron_rl.reporting.plots import Panel, Plot, Rows, render_svg

METRICS = {"eval/accuracy": "held out", "accuracy/train": "training"}
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_STYLE = Path(plots.__file__).with_name("style.html.j2")


def draw_accuracy(runs: dict[str, Rows]) -> str:
    """Return an SVG file's text: for each run, by label, one line of each of METRICS. It carries the report's colours."""
    lines = {f"{words}, {label}": (rows, metric) for metric, words in METRICS.items() for label, rows in runs.items()}
    panel = Panel("correct", "share", legend=True, series=tuple((name, name) for name in lines))
    svg = render_svg(Plot("Accuracy", (panel,)), merge_rows(lines))
    style = _STYLE.read_text(encoding="utf-8").partition("#}")[2].strip()
    return svg.replace("<svg ", f"<svg {_NAMESPACES} ", 1).replace(">", f">{style}", 1)


def main(output: Path, runs: list[Path]) -> None:
    """Draw the RUNS (run folders) into OUTPUT."""
    labels = [f"seed {read_run(folder)['config']['train']['seed']}" for folder in runs]
    if len(set(labels)) < len(labels):
        raise UserError("RUNS", [str(run) for run in runs], f"have the labels {', '.join(labels)}", "name runs of different seeds")
    output.write_text(draw_accuracy({label: read_metrics(folder) for label, folder in zip(labels, runs, strict=True)}), encoding="utf-8")
    typer.echo(f"{output}: {output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    run_script(main)
