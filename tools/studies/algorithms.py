"""Train one task with each algorithm and draw their curves on one page.

    python tools/studies/algorithms.py [--config FILE] [--algorithms grpo,gspo] [--steps N] [--out DIR] [--section.key=value ...]

Runs are made one after the other, each in its own folder below DIR; a run that is finished is not made again, so a study that was
stopped goes on where it was. The page is DIR/study.html, written anew after every run. Further arguments go to every run.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import common
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.config.algorithm import PRESETS
from megatron_rl.reporting.formatting import format_value
from megatron_rl.reporting.plots import Rows

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
_HEAD = ("algorithm", "steps", "held-out accuracy: first", "best", "last")


def _make_line(name: str, rows: Rows) -> list[object]:
    scores = [score for row in rows if (score := row.get("eval/accuracy")) is not None]
    numbers = [format_value(score, "share") for score in (scores[0], max(scores), scores[-1])] if scores else ["–"] * 3
    return [name, rows[-1]["step"] if rows else 0, *numbers]


def main(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="The task; only the algorithm is changed.")] = Path("configs/quickstart.toml"),
    algorithms: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(PRESETS),
    steps: Annotated[int, typer.Option(min=1, help="RL steps of each run.")] = 50,
    out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("runs/algorithm-study"),
) -> None:
    """Train one task with each algorithm and draw their curves on one page."""
    out = out.resolve()
    intro = f"{config}, {steps} steps each" + (f", with {' '.join(context.args)}" if context.args else "")
    finished: dict[str, Rows] = {}

    def draw(name: str, rows: Rows, code: int) -> str:
        finished[name] = rows
        lines = [_make_line(name, rows) for name, rows in finished.items()]
        return common.make_table(_HEAD, lines) + common.draw_figures(finished, SHOWN)

    runs = [
        common.StudyRun(
            name,
            out / name,
            [f"--algorithm.name={name}", f"--train.steps={steps}", *context.args],
            partial(draw, name),
        )
        for name in common.parse_names(algorithms, PRESETS, "--algorithms")
    ]
    common.run_study(out / "study.html", "Algorithm study", intro, runs, config)


if __name__ == "__main__":
    run_script(main)
