"""Train one task in several variants, with several seeds, and compare the runs in one table.

    python tools/compare_runs.py configs/quickstart.toml --vary algorithm.name=grpo,gspo --seeds 2 --train.steps=50
    python tools/compare_runs.py configs/quickstart.toml --vary precision.mode=bf16,fp8_rollout --vary algorithm.correction=none,tis

Each combination of the `--vary` values is a variant; further options apply to every run. Each run has its own folder, DIR/VARIANT/seedN.
A finished run with the same configuration is not repeated, so an interrupted comparison continues where it stopped. `tensorboard --logdir
DIR` shows the curves of all runs. The table is printed in Markdown at the end. With `--svg FILE` the curves of held-out and training
accuracy are written to a file for a page such as the README.
"""

import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, NamedTuple

import typer

from megatron_rl.cli.main import run_script
from megatron_rl.config import Config, load_config
from megatron_rl.errors import UserError
from megatron_rl.metrics import MetricValue, Unit
from megatron_rl.observability.run_folder import read_metrics, read_run
from megatron_rl.reporting import plots
from megatron_rl.reporting.formatting import format_value
from megatron_rl.reporting.plots import Panel, Plot, Rows, render_svg

ROOT = Path(__file__).parents[1]
BROKEN = 3
"""Exit code of a run that failed after it started. Its rows are shown; any other error ends the comparison."""
_HEAD = ("variant", "runs", "held-out accuracy: first", "best", "last", "mismatch: mean", "largest", "largest gradient norm", "broken")
_SVG_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
_SVG_STYLE = Path(plots.__file__).with_name("style.html.j2")


class Run(NamedTuple):
    variant: str
    seed: int
    folder: Path
    overrides: Sequence[str]

    def make(self, config: Path) -> int:
        """Train the run unless it is finished; return the exit code."""
        overrides = [f"--log.dir={self.folder}", *self.overrides]
        if self._is_finished(load_config(config, overrides)):
            return 0

        def run(*words: str) -> int:
            command = [sys.executable, "-m", *words, str(config), *overrides]
            return subprocess.run(command, cwd=ROOT, check=False).returncode

        return run("examples.arithmetic.warm_start") or run("megatron_rl", "train")

    def _is_finished(self, config: Config) -> bool:
        try:
            run = read_run(self.folder / "latest")
        except UserError:
            return False
        return run["status"] == "finished" and run["config"] == config.model_dump(mode="json")


class Result(NamedTuple):
    """The metrics rows of a run, and whether the run broke."""

    run: Run
    rows: Rows
    broken: bool


def parse_variants(options: Sequence[str]) -> dict[str, list[str]]:
    """Return {label: overrides} of every combination. Raise UserError if an option is not section.key=VALUE,VALUE."""
    choices = []
    for option in options:
        name, _, values = option.partition("=")
        if "." not in name or not values:
            raise UserError("--vary", option, "is not section.key=VALUE,VALUE", "use for example algorithm.name=grpo,gspo")
        choices.append([(value, f"--{name}={value}") for value in values.split(",")])
    combinations = itertools.product(*choices)
    return {"+".join(value for value, _ in each) or "run": [override for _, override in each] for each in combinations}


def summarize(results: Sequence[Result]) -> list[list[object]]:
    """Return one table line per variant: means over runs of accuracies and mismatch, and extremes over all runs."""
    variants = dict.fromkeys(result.run.variant for result in results)
    return [_summarize(variant, [result for result in results if result.run.variant == variant]) for variant in variants]


def _summarize(variant: str, results: Sequence[Result]) -> list[object]:
    def read(metric: str) -> list[list[float]]:
        return [[value for row in result.rows if (value := row.get(metric)) is not None] for result in results]

    def flatten(metric: str) -> list[float]:
        return [value for values in read(metric) for value in values]

    scores = [values for values in read("eval/accuracy") if values]
    ends = ([values[0] for values in scores], [max(values) for values in scores], [values[-1] for values in scores])
    return [
        variant,
        len(results),
        *(_format(mean(values) if values else None, "share") for values in ends),
        _format(mean(values) if (values := flatten("mismatch/abs_mean")) else None, "small"),
        *(_format(max(flatten(metric), default=None), "small") for metric in ("mismatch/abs_max", "grad_norm")),
        ", ".join(f"seed {result.run.seed}" for result in results if result.broken) or "none",
    ]


def _format(number: float | None, unit: Unit) -> str:
    return "–" if number is None else format_value(number, unit)


def draw_accuracy(results: Sequence[Result]) -> str:
    """Return an SVG file with the held-out and the training accuracy of each run, in the colors of the report."""
    several = len({result.run.variant for result in results}) > 1
    labels, rows = list[tuple[str, str]](), dict[int, dict[str, MetricValue]]()
    for metric, words in (("eval/accuracy", "held out"), ("accuracy/train", "training")):
        for result in results:
            label = f"{words}, " + f"{result.run.variant}, " * several + f"seed {result.run.seed}"
            points = {int(row["step"] or 0): value for row in result.rows if (value := row.get(metric)) is not None}
            labels += [(label, label)] * bool(points)
            for step, value in points.items():
                rows.setdefault(step, {"step": step})[label] = value
    plot = Plot("Accuracy", (Panel("correct", "share", legend=True, series=tuple(labels)),))
    style = _SVG_STYLE.read_text(encoding="utf-8").partition("#}")[2].strip()
    svg = render_svg(plot, [rows[step] for step in sorted(rows)])
    return svg.replace("<svg ", f"<svg {_SVG_NAMESPACES} ", 1).replace(">", f">{style}", 1)


def main(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="TOML file of the task; --section.key=value may follow.")],
    vary: Annotated[list[str], typer.Option(help="Setting to vary, as section.key=VALUE,VALUE; repeatable.")] = [],  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the comparison.")] = Path("runs/comparison"),
    svg: Annotated[Path | None, typer.Option(help="Write the accuracy curves to this SVG file.")] = None,
) -> None:
    """Train one task in several variants and compare the runs."""
    config, out, variants = config.resolve(), out.resolve(), parse_variants(vary)
    runs = [
        Run(variant, seed, out / variant / f"seed{seed}", [f"--train.seed={seed}", *overrides, *context.args])
        for seed in range(seeds)
        for variant, overrides in variants.items()
    ]
    for run in runs:
        load_config(config, run.overrides)  # refuses a mistake in any run before the first starts
    results: list[Result] = []
    for run in runs:
        if (code := run.make(config)) not in (0, BROKEN):
            raise typer.Exit(code)
        results.append(Result(run, read_metrics(run.folder / "latest"), code == BROKEN))
        print(f"{run.variant}, seed {run.seed}: {run.folder / 'latest'}", flush=True)
    print("\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (_HEAD, ["---"] * len(_HEAD), *summarize(results))))
    if svg:
        svg.write_text(draw_accuracy(results), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
