"""Train one task in every precision mode, with several seeds and in harder settings, and draw them side by side on one page.

    python tools/studies/precision.py [--config FILE] [--modes bf16,fp8_rollout,fp8_rollout+tis] [--settings plain,long_answers]
                                    [--seeds N] [--steps N] [--jobs N] [--replay none,engine] [--out DIR] [--section.key=value ...]

Each run has its own folder DIR/SETTING/MODE/seedN; a run that is finished is not made again. The page is DIR/study.html, written anew
after every run; its tables are printed in Markdown at the end. Further arguments go to every run. How to read them: docs/results/study.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated

import by_position
import common
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.metrics import Unit
from megatron_rl.reporting.formatting import format_value
from megatron_rl.reporting.plots import Rows
from megatron_rl.reporting.report import CAUSE_LABELS
from parallel.formats import MODES

REPLAYS = ("none", "trainer", "engine")
_HIGH_RATE = "--train.learning_rate=1.25e-4"
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "plain": ("The config as it is.", []),
    "long_answers": (
        "Twelve operations in place of two to five: an answer that works step by step has 26 tokens, each a chance to leave the policy.",
        ["--data.settings.levels=[12]", "--rollout.max_new_tokens=48"],
    ),
    "high_learning_rate": ("Two and a half times the quickstart's learning rate.", [_HIGH_RATE]),
    "many_updates": ("Eight optimizer steps per rollout in place of two.", ["--algorithm.updates_per_step=8"]),
    "all_at_once": (
        "Long answers, the high learning rate and many updates together.",
        ["--data.settings.levels=[12]", "--rollout.max_new_tokens=48", _HIGH_RATE, "--algorithm.updates_per_step=8"],
    ),
}
"""Name -> what is harder in it, and the overrides that make it so."""

FALL = 0.1
"""A step whose mean reward is lower than the step's before it by more than this counts as a fall."""
ATTRIBUTE_EVERY = 10
SAMPLES = 64
"""Answers of a step whose mismatch by position is kept."""
TIS = "+tis"
"""Ends the name of a mode that is run with truncated importance sampling."""

SHOWN = {
    "eval/accuracy": ("Held-out accuracy", "correct", "share"),
    "reward/mean": ("Reward", "mean of the completions", "number"),
    "mismatch/abs_mean": ("Mismatch |Δ log p|, mean over tokens", "nats", "log"),
    "mismatch/abs_max": ("Mismatch |Δ log p|, largest", "nats", "log"),
    "mismatch/k3_kl": ("KL(rollout ‖ trainer), k3 estimate", "nats per token", "log"),
    "update/abs_mean": ("|Δ log p| of the step's own update, mean over tokens", "nats", "log"),
    "precision/response": ("Engine's weights moved / masters moved", "ratio", "log"),
    "grad_norm": ("Gradient norm", "norm before clipping", "log"),
    "clip/positive": ("Tokens that the clip touches, advantage above 0", "tokens", "share"),
    "clip/negative": ("Tokens that the clip touches, advantage below 0", "tokens", "share"),
    "entropy": ("Entropy", "nats per token", "number"),
    "length/mean": ("Completion length", "tokens", "number"),
    "mismatch/without_replay/abs_mean": ("Mismatch, had the routing not been replayed", "nats", "log"),
    "router/differs": ("Tokens that the trainer would send to other experts", "tokens", "share"),
    "router/load_max": ("Load of experts in the most uneven layer", "most / mean", "number"),
}


@dataclass
class Variant:
    """One mode in one setting: the rows of its runs, one for each seed so far, their answers, and which seeds broke."""

    runs: list[Rows] = field(default_factory=list)
    answers: list[by_position.Answer] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)

    def values(self, metric: str) -> list[list[float]]:
        """Return the metric's finite values in every run, in the order of steps."""
        return [[value for row in rows if (value := row.get(metric)) is not None] for rows in self.runs]

    def all_values(self, metric: str) -> list[float]:
        """Return the same over all runs."""
        return [value for values in self.values(metric) for value in values]

    def curve(self, metrics: Iterable[str]) -> Rows:
        """Return for each step the mean over the runs that measured it, of each of `metrics`."""
        by_step: dict[int, dict[str, list[float]]] = {}
        for row in (row for rows in self.runs for row in rows):
            for metric in metrics:
                if (value := row.get(metric)) is not None:
                    by_step.setdefault(int(row["step"] or 0), {}).setdefault(metric, []).append(value)
        return [{"step": step, **{metric: mean(values) for metric, values in of_step.items()}} for step, of_step in sorted(by_step.items())]


def count_falls(rewards: list[float]) -> int:
    """Count the steps whose reward is lower than that of the step before by more than FALL."""
    return sum(after < before - FALL for before, after in pairwise(rewards))


def compute_deepest_fall(scores: list[float]) -> float:
    """Return how far an accuracy ever was below the best before it."""
    return max((max(scores[: step + 1]) - score for step, score in enumerate(scores)), default=0.0)


_AT_POSITION = "mismatch by position"
_STABILITY = (
    "mode", "seeds", "held-out accuracy: first", "best", "last", "spread of the last over seeds", "its deepest fall",
    "reward: first", "last", "falls per run", "entropy: first", "last", "mismatch: mean", "largest", "largest gradient norm", "broken",
)  # fmt: skip


def make_stability_line(name: str, variant: Variant) -> list[object]:
    """Return a mode's line; means over runs, but extremes over all of them."""
    scores = [values for values in variant.values("eval/accuracy") if values]
    first, best, last = ([pick(values) for values in scores] for pick in (lambda v: v[0], max, lambda v: v[-1]))
    mismatch = variant.all_values("mismatch/abs_mean")
    return [
        name,
        len(variant.runs),
        *(_format(mean(values) if values else None, "share") for values in (first, best, last)),
        _format(max(last) - min(last) if len(last) > 1 else None, "share"),
        _format(max(map(compute_deepest_fall, scores), default=None), "share"),
        *format_ends(variant, "reward/mean"),
        _format(mean(map(count_falls, variant.values("reward/mean"))) if variant.runs else None, "number"),
        *format_ends(variant, "entropy"),
        _format(mean(mismatch) if mismatch else None, "small"),
        *(_format(max(variant.all_values(metric), default=None), "small") for metric in ("mismatch/abs_max", "grad_norm")),
        ", ".join(f"seed {seed}" for seed in variant.broken) or "none",
    ]


def format_ends(variant: Variant, metric: str) -> list[str]:
    """Return the metric's first and last values, means over runs."""
    runs = [values for values in variant.values(metric) if values]
    return [_format(mean(values[end] for values in runs) if runs else None, "number") for end in (0, -1)]


def _format(number: float | None, unit: Unit) -> str:
    return "–" if number is None else format_value(number, unit)


def make_cause_line(name: str, variant: Variant) -> list[object]:
    """Return the mean |Δ log p| of each cause, over all attributions of all runs."""
    by_cause = [variant.all_values(f"mismatch/cause/{cause}/abs_mean") for cause in CAUSE_LABELS]
    return [name, *(_format(mean(values) if values else None, "small") for values in by_cause)]


def make_position_table(variants: dict[str, Variant]) -> tuple[list[str], list[list[object]]]:
    """Return head and lines of the mismatch by position, each with its standard error: a bin's mean, and the slope."""
    bins = {name: by_position.average_by_bin(variant.answers) for name, variant in variants.items()}
    columns = max(bins.values(), key=len, default=[])
    lines = []
    for name, variant in variants.items():
        slope = by_position.estimate_slope(variant.answers)
        cells = [f"{_format_estimate(part.mean)} ({part.tokens})" for part in bins[name]]
        lines.append([name, len(variant.answers), *cells, *["–"] * (len(columns) - len(cells)), _format_estimate(slope) if slope else "–"])
    return ["mode", "answers", *(f"{part.start}–{part.end - 1}" for part in columns), "per 100 positions"], lines


def _format_estimate(estimate: by_position.Estimate) -> str:
    return f"{estimate.value:.2e} ± {estimate.error:.0e}" if estimate.value or estimate.error > 0 else "0"


def make_tables(variants: dict[str, Variant]) -> Iterator[tuple[str, Sequence[str], list[list[object]]]]:
    """Yield (title, head, lines) of one setting's tables."""
    yield "", _STABILITY, [make_stability_line(name, variant) for name, variant in variants.items()]
    causes = [make_cause_line(name, variant) for name, variant in variants.items()]
    yield "Mean |Δ log p| by cause, in nats per token", ("mode", *CAUSE_LABELS.values()), causes
    yield "Mean |Δ log p| by position in the answer ± standard error (tokens)", *make_position_table(variants)


def draw_section(setting: str, variants: dict[str, Variant]) -> str:
    """Return one setting's part of the page."""
    tables = "".join(f"<h3>{title}</h3>{common.make_table(head, lines)}" for title, head, lines in make_tables(variants))
    curves = {name: variant.curve(SHOWN) for name, variant in variants.items()}
    positions: dict[str, Rows] = {
        name: [{"step": part.start, _AT_POSITION: part.mean.value} for part in by_position.average_by_bin(variant.answers)]
        for name, variant in variants.items()
    }
    figure = common.draw_figures(positions, {_AT_POSITION: ("Mismatch by position", "mean |Δ log p| (nats)", "log")}, "position, from")
    title = f"<h2>{setting.replace('_', ' ').capitalize()}</h2><p>{SETTINGS[setting][0]}</p>"
    return title + tables + figure + common.draw_figures(curves, SHOWN)


def make_overrides(setting: str, name: str, seed: int, steps: int, out: Path, replay: str = "") -> list[str]:
    """Return what a run changes in the config. `name`: its mode, maybe with `TIS`. Runs on the same problems share a warm-started model,
    which the first of them makes."""
    changes = SETTINGS[setting][1]
    model = "model_long_answers" if any(change.startswith("--data.settings.levels") for change in changes) else "model"
    return [
        f"--model.path={out / model}",
        f"--precision.mode={name.removesuffix(TIS)}",
        f"--algorithm.correction={'tis' if name.endswith(TIS) else 'none'}",
        f"--train.seed={seed}",
        f"--train.steps={steps}",
        f"--log.attribute_every={ATTRIBUTE_EVERY}",
        f"--log.samples={SAMPLES}",
        *([f"--algorithm.routing_replay={replay}"] if replay else []),
        *changes,
    ]


def main(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="The task.")] = Path("configs/quickstart.toml"),
    modes: Annotated[str, typer.Option(help=f"precision.mode, separated by commas; MODE{TIS} with TIS.")] = ",".join(MODES),
    settings: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(SETTINGS),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each mode in each setting.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="RL steps of each run.")] = 50,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, which share the cores.")] = 1,
    replay: Annotated[str, typer.Option(help="Each mode with each algorithm.routing_replay, separated by commas; needs experts.")] = "",
    out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("runs/precision-study"),
) -> None:
    """Train one task in every precision mode, with several seeds and in harder settings, and draw them side by side on one page."""
    names = common.parse_names(modes, [mode + suffix for mode in MODES for suffix in ("", TIS)], "--modes")
    replays = common.parse_names(replay, REPLAYS, "--replay") if replay else [""]
    variants = {f"{name}+{replayed}" if replayed else name: (name, replayed) for replayed in replays for name in names}
    results = {setting: {label: Variant() for label in variants} for setting in common.parse_names(settings, SETTINGS, "--settings")}
    out, sections = out.resolve(), dict[str, str]()

    def draw(setting: str, label: str, seed: int, rows: Rows, code: int) -> str:
        variant = results[setting][label]
        variant.broken += [seed] if code else []
        variant.runs.append(rows)
        variant.answers += by_position.read_answers(out / setting / label / f"seed{seed}" / "latest")
        sections[setting] = draw_section(setting, results[setting])
        return "".join(sections.values())

    runs = [
        common.StudyRun(
            f"{setting}, {label}, seed {seed}",
            out / setting / label / f"seed{seed}",
            [*make_overrides(setting, name, seed, steps, out, replayed), *context.args],
            partial(draw, setting, label, seed),
        )
        for seed in range(seeds)
        for setting in results
        for label, (name, replayed) in variants.items()
    ]
    intro = f"{config}, {steps} steps each, curves are means over seeds" + (f"; with {' '.join(context.args)}" if context.args else "")
    common.run_study(out / "study.html", "Precision study", intro, runs, config, broken=(common.BROKEN,), jobs=jobs)
    for setting in results:
        for title, head, lines in make_tables(results[setting]):
            print(f"\n{setting}: {title}\n\n{common.format_markdown(head, lines)}")


if __name__ == "__main__":
    run_script(main)
