"""Trains one task with each algorithm and draws their curves on one page.

    python tools/algorithm_study.py [--config FILE] [--algorithms grpo,gspo] [--steps N] [--out DIR] [--section.key=value ...]

Runs are made one after the other, each in its own folder below DIR; a run that is finished is not made again, so a study that was
stopped goes on where it was. The page is DIR/study.html, written anew after every run. Further arguments go to every run.
"""

from __future__ import annotations

import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from megatron_rl.config_algorithm import PRESETS
from megatron_rl.errors import UserError
from megatron_rl.report_plots import Panel, Plot, Rows, svg
from megatron_rl.report_words import write
from megatron_rl.runlog import read_metrics, read_run

ROOT = Path(__file__).parents[1]
SHOWN = {
    "eval/accuracy": ("Held-out accuracy", "correct", "share"),
    "accuracy/train": ("Accuracy as sampled", "correct", "share"),
    "entropy": ("Entropy", "nats per token", "number"),
    "length/mean": ("Completion length", "tokens", "number"),
    "clip/positive": ("Tokens that the clip touches, advantage above 0", "tokens", "share"),
    "clip/negative": ("Tokens that the clip touches, advantage below 0", "tokens", "share"),
    "grad_norm": ("Gradient norm", "norm before clipping", "number"),
    "time/step": ("Time of a step", "seconds", "number"),
}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Algorithm study</title><style>
:root {{ --page: #f5f6f8; --card: #fff; --ink: #1c2430; --grid: #dde2e8;
  --s1: #0072b2; --s2: #d55e00; --s3: #009e73; --s4: #b3589a; --s5: #e69f00; --s6: #56b4e9; --s7: #b8a800; --s8: #8b95a1; }}
body {{ margin: 2rem auto; max-width: 1400px; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(600px, 1fr)); gap: 1rem; }}
figure, table {{ margin: 0; padding: 1rem; background: var(--card); border: 1px solid var(--grid); border-radius: 8px; }}
td, th {{ padding: .1rem .8rem; text-align: right; }} td:first-child, th:first-child {{ text-align: left; }}
</style><h1>Algorithm study</h1><p>{intro}</p><table>{table}</table><main>{figures}</main></html>
"""


def finished(folder: Path, steps: int) -> bool:
    """Whether the newest run below `folder` came to its end with as many steps."""
    try:
        run = read_run(folder / "latest")
    except UserError:
        return False
    return run["status"] == "finished" and run["config"]["train"]["steps"] == steps


def train(config: Path, algorithm: str, steps: int, folder: Path, more: list[str]) -> int:
    """One run in a process of its own; its exit code. What is given in `more` comes last and so wins."""
    settings = [f"--algorithm.name={algorithm}", f"--train.steps={steps}", f"--log.dir={folder}", *more]
    return subprocess.run([sys.executable, "-m", "megatron_rl", "train", str(config), *settings], cwd=ROOT, check=False).returncode


def page(runs: dict[str, Rows], intro: str) -> str:
    """The study as one self-contained page; `runs` maps an algorithm to its metrics."""
    figures = []
    for metric, (title, ylabel, kind) in SHOWN.items():
        steps = sorted({int(row["step"] or 0) for rows in runs.values() for row in rows if metric in row})
        held = {name: {int(row["step"] or 0): row[metric] for row in rows if metric in row} for name, rows in runs.items()}
        merged = [{"step": step, **{name: found[step] for name, found in held.items() if step in found}} for step in steps]
        drawn = svg(Plot(title, "", (Panel(ylabel, tuple((name, name) for name in runs), kind, legend=True),)), merged)
        figures += [f"<figure><h2>{escape(title)}</h2>{drawn}</figure>"] if drawn else []
    head = "<tr><th>algorithm</th><th>steps</th><th>held-out accuracy: first</th><th>best</th><th>last</th></tr>"
    return _PAGE.format(
        intro=escape(intro), table=head + "".join(_line(name, rows) for name, rows in runs.items()), figures="".join(figures)
    )


def _line(name: str, rows: Rows) -> str:
    scores = [score for row in rows if (score := row.get("eval/accuracy")) is not None]
    numbers = [write(score, "share") for score in (scores[0], max(scores), scores[-1])] if scores else ["–"] * 3
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in (name, rows[-1]["step"] if rows else 0, *numbers)) + "</tr>"


def main(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="The task; only its algorithm's name is changed.")] = Path("configs/quickstart.toml"),
    algorithms: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(PRESETS),
    steps: Annotated[int, typer.Option(min=1, help="RL steps of each run.")] = 50,
    out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("runs/algorithm-study"),
) -> None:
    """Trains one task with each algorithm and draws their curves on one page."""
    names = [name for name in algorithms.split(",") if name]
    unknown = [name for name in names if name not in PRESETS]
    if unknown or not names:
        raise typer.BadParameter(f"{', '.join(unknown) or 'nothing'}: choose from {', '.join(PRESETS)}", param_hint="--algorithms")
    out = out.resolve()
    runs: dict[str, Rows] = {}
    for name in names:
        if not finished(out / name, steps) and (code := train(config, name, steps, out / name, context.args)):
            raise typer.Exit(code)
        runs[name] = read_metrics(out / name / "latest")
        intro = f"{config}, {steps} steps each" + (f", with {' '.join(context.args)}" if context.args else "")
        (out / "study.html").write_text(page(runs, intro), encoding="utf-8")
        print(f"{name}: {out / name / 'latest'}; the page is {out / 'study.html'}", flush=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    app()
