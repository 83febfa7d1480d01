"""Where FP32 masters begin, and what the first optimizer steps do to the policy: `precision.masters` "stored" against "spread".

    python tools/studies/first_steps.py weights [--checkpoint FOLDER] [--rate 1e-6]      # Adam's first steps on weights alone: a minute
    python tools/studies/first_steps.py changed [--checkpoint FOLDER] [--rates 1e-6,1e-5,1e-4]      # bytes and blocks that one step changes
    python tools/studies/first_steps.py runs --config FILE [--modes fp8_unified,fp8_rollout] [--seeds N] [--steps 10] [--out DIR]
                                             [--section.key=value ...]                   # the same runs with both kinds of masters

`weights` takes steps of `--rate` with a random sign for every weight, the same at every step, as Adam's are while gradients keep theirs,
and prints a Markdown table; without a checkpoint, of Gaussian weights. `runs` are made one after the other, each in a folder of its own,
DIR/MODE/MASTERS/seedN; a finished one is not made again. It prints a table of each metric by step, and writes curves to DIR/study.html.
docs/reference/precision.md says what to expect.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated

import common
import torch
import torch.nn.functional as F
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.precision.contract import QUANTIZED_ROLES
from megatron_rl.precision.masters import hash_places, spread, spread_blocks, spread_within_blocks
from megatron_rl.precision.quantizers import dequantize, quantize
from megatron_rl.reporting.plots import Rows
from parallel.formats import BLOCK, FP8, INT8, MODES, TensorFormat
from parallel.model_geometry import ModelGeometry
from parallel.shards import Rect, take_all

MASTERS = ("stored", "spread")
STEPS = (1, 10, 100, 1000)
"""After so many steps of the weights alone."""
SHOWN = {
    "reward/mean": ("Reward", "mean of the completions", "number"),
    "grad_norm": ("Gradient norm", "norm before clipping", "log"),
    "update/abs_mean": ("|Δ log p| of the step's own update, mean over tokens", "nats", "log"),
    "update/abs_max": ("|Δ log p| of the step's own update, largest", "nats", "log"),
    "precision/response": ("Movement of the engine's weights / of their masters", "ratio", "log"),
    "precision/changed_share": ("Quantized values that the step changed", "values", "log"),
    "mismatch/abs_mean": ("Mismatch |Δ log p|, mean over tokens", "nats", "log"),
}


def read_weights(checkpoint: Path | None, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, BF16 matrix) of `count` tensors of a BF16 checkpoint that a mode may quantize, evenly over its layers; or Gaussian ones,
    as a model is initialized with."""
    if checkpoint is None:
        generator = torch.Generator().manual_seed(0)
        yield from ((f"gaussian {n}", (torch.randn(1024, 1024, generator=generator) * 0.02).bfloat16()) for n in range(min(count, 4)))
        return
    config = read_config(checkpoint)
    source, model = HFCheckpoint(checkpoint, config, "--checkpoint"), ModelGeometry.from_hf_config(config)
    source.check(model)
    tensors = [tensor for tensor in model.tensors().values() if tensor.role in QUANTIZED_ROLES]
    for tensor in tensors[:: -(-len(tensors) // count)]:
        yield tensor.name, source.read_values(take_all(tensor)).bfloat16()


def copy_in(format: TensorFormat | None, masters: torch.Tensor) -> torch.Tensor:
    """Return the values of the policy's copy, float32; None: BF16."""
    return masters.bfloat16().float() if format is None else dequantize(quantize(masters, format), format)


def measure_follow(masters: torch.Tensor, through: list[TensorFormat | None], rate: float) -> torch.Tensor:
    """Return float64 [len(STEPS), 3]: sums over the weights of |movement of the copy|, |movement of the master|, and [the copy changed].
    `through`: the formats that lead to the copy."""
    direction = torch.where(masters == 0, 0.0, torch.randn(masters.shape, generator=torch.Generator().manual_seed(1)).sign())

    def copy(values: torch.Tensor) -> torch.Tensor:
        for format in through:
            values = copy_in(format, values)
        return values

    before, sums = copy(masters), []
    for steps in STEPS:
        stepped = masters + steps * rate * direction
        moved = (copy(stepped) - before).abs()
        sums.append(torch.stack([moved.double().sum(), (stepped - masters).abs().double().sum(), (moved != 0).double().sum()]))
    return torch.stack(sums)


_FP8 = FP8.with_scales("pow2")
COPIES: dict[str, list[TensorFormat | None]] = {
    "FP8, power-of-two scales": [_FP8],
    "FP8, FP32 scales": [FP8.with_scales("fp32")],
    "INT8": [INT8],
    "BF16": [None],
    "FP8 of a BF16 parameter": [None, _FP8],
}
"""What a policy has of a master -> the formats that lead there."""


def make_masters(name: str, weight: torch.Tensor, through: list[TensorFormat | None], kind: str) -> torch.Tensor:
    """Return the masters of a BF16 weight."""
    places = hash_places(0, name, Rect(0, 0, *weight.shape))
    if kind == "stored":
        return weight.float()
    return spread(weight, places) if through[0] is None else spread_within_blocks(weight, places, through[0])


def weights(
    checkpoint: Annotated[Path | None, typer.Option(help="BF16 checkpoint in Hugging Face format.")] = None,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-6,
    tensors: Annotated[int, typer.Option(min=1, help="How many weights to measure.")] = 14,
) -> None:
    """Take Adam's first steps on weights alone."""
    sums: dict[tuple[str, str], torch.Tensor] = {}
    nonzero = 0
    for name, weight in read_weights(checkpoint, tensors):
        nonzero += int(weight.count_nonzero())
        blocks, places = quantize(weight, _FP8), hash_places(0, name, Rect(0, 0, *weight.shape))
        cases = {(copy, kind): (make_masters(name, weight, through, kind), through) for copy, through in COPIES.items() for kind in MASTERS}
        cases["FP8, from an FP8 checkpoint", "stored"] = dequantize(blocks, _FP8), [_FP8]
        cases["FP8, from an FP8 checkpoint", "spread"] = spread_blocks(blocks, places, _FP8), [_FP8]
        for case, (masters, through) in cases.items():
            sums[case] = sums.get(case, torch.zeros(len(STEPS), 3, dtype=torch.float64)) + measure_follow(masters, through, rate)
    print(f"{checkpoint or 'Gaussian weights'}: {nonzero:,} weights that are not 0, steps of {rate:g}\n")
    after = [f"after {steps}" if steps > 1 else "response: first step" for steps in STEPS]
    lines = [
        [copy, kind, f"{100 * float(total[0, 2]) / nonzero:.3g} %", *(f"{float(moved / stepped):.3g}" for moved, stepped, _ in total)]
        for (copy, kind), total in sums.items()
    ]
    print(common.format_markdown(["policy's copy", "masters", "values changed by the first step", *after], lines))


def count_changed(before: torch.Tensor, after: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return float64 [4]: bytes of the `counted` elements, those that differ, 128x128 blocks with such elements, with such bytes."""
    differs = (before.view(torch.uint8) != after.view(torch.uint8)).view(*before.shape, before.element_size())
    blocks = [
        F.max_pool2d(mask.float()[None], BLOCK, ceil_mode=True).sum() if min(mask.shape) >= BLOCK else mask.any()
        for mask in (counted, differs.any(-1))
    ]
    return torch.stack([counted.sum() * before.element_size(), differs.sum(), *blocks]).double()


def count_changed_by_step(name: str, weight: torch.Tensor, rate: float) -> dict[tuple[str, int], torch.Tensor]:
    """Return `count_changed` of an FP8 copy, its scales, and a BF16 copy, in steps 1 and 10 of signs drawn anew at every step. Weights that
    are 0 do not count: here they are padding."""
    places, counts = hash_places(0, name, Rect(0, 0, *weight.shape)), dict[tuple[str, int], torch.Tensor]()
    for copy, masters in (("FP8", spread_within_blocks(weight, places, _FP8)), ("BF16", spread(weight, places))):
        counted = masters != 0
        for step in range(1, 11):
            signs = torch.randn(masters.shape, generator=torch.Generator().manual_seed(step)).sign()
            stepped = masters + rate * counted * signs
            if step in (1, 10) and copy == "FP8":
                before, after = quantize(masters, _FP8), quantize(stepped, _FP8)
                counts["FP8 values", step] = count_changed(before.data, after.data, counted)
                counts["FP8 scales", step] = count_changed(before.scale, after.scale, torch.ones_like(before.scale, dtype=torch.bool))
            elif step in (1, 10):
                counts["BF16 values", step] = count_changed(masters.bfloat16(), stepped.bfloat16(), counted)
            masters = stepped
    return counts


def changed(
    checkpoint: Annotated[Path | None, typer.Option(help="BF16 checkpoint in Hugging Face format.")] = None,
    rates: Annotated[str, typer.Option(help="Learning rates, separated by commas.")] = "1e-6,1e-5,1e-4",
    tensors: Annotated[int, typer.Option(min=1, help="How many weights to measure.")] = 14,
) -> None:
    """Count the bytes and the blocks of the policy that one optimizer step changes."""
    sums: dict[tuple[str, str, int], torch.Tensor] = {}
    for name, weight in read_weights(checkpoint, tensors):
        for rate in rates.split(","):
            for (copy, step), counts in count_changed_by_step(name, weight, float(rate)).items():
                sums[rate, copy, step] = sums.get((rate, copy, step), 0.0) + counts
    lines = [
        [rate, copy, str(step), f"{100 * float(changed / total):.3g} %", f"{100 * float(touched / blocks):.3g} %"]
        for (rate, copy, step), (total, changed, blocks, touched) in sums.items()
    ]
    print(common.format_markdown(["rate", "copy", "step", "bytes changed", "128x128 blocks with a change"], sorted(lines)))


def make_tables(finished: dict[str, list[Rows]]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (title, head, lines) of a table for each metric that some run has: a line for each kind of run, means over seeds by step."""
    for metric, (title, *_) in SHOWN.items():
        lines, steps = [], sorted({int(row["step"] or 0) for runs in finished.values() for rows in runs for row in rows if metric in row})
        for label, runs in finished.items() if steps else ():
            by_step = [
                [value for rows in runs for row in rows if row["step"] == step and (value := row.get(metric)) is not None] for step in steps
            ]
            lines.append([label, *(f"{mean(values):.3g}" if values else "–" for values in by_step)])
        if lines:
            yield title, ["step", *map(str, steps)], lines


def runs(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="The task and its model.")],
    modes: Annotated[str, typer.Option(help="precision.mode, separated by commas.")] = "fp8_unified,fp8_rollout",
    masters: Annotated[str, typer.Option(help="precision.masters, separated by commas.")] = ",".join(MASTERS),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="RL steps of each run.")] = 10,
    out: Annotated[Path, typer.Option(help="Folder of the study.")] = Path("runs/first-steps"),
) -> None:
    """Make the same runs with both kinds of masters and compare their first steps."""
    out, finished = out.resolve(), dict[str, list[Rows]]()

    def draw(label: str, rows: Rows, code: int) -> str:
        finished.setdefault(label, []).append(rows)
        tables = "".join(f"<h3>{title}</h3>{common.make_table(head, lines)}" for title, head, lines in make_tables(finished))
        return tables + common.draw_figures({label: runs[0] for label, runs in finished.items()}, SHOWN)

    arms = [
        common.StudyRun(
            f"{mode}, {kind}, seed {seed}",
            out / mode / kind / f"seed{seed}",
            [f"--precision.mode={mode}", f"--precision.masters={kind}", f"--train.seed={seed}", f"--train.steps={steps}", *context.args],
            partial(draw, f"{mode}, {kind}"),
        )
        for seed in range(seeds)
        for mode in common.parse_names(modes, MODES, "--modes")
        for kind in common.parse_names(masters, MASTERS, "--masters")
    ]
    intro = f"{config}, {steps} steps, seeds {list(range(seeds))}" + (f"; with {' '.join(context.args)}" if context.args else "")
    common.run_study(out / "study.html", "The first optimizer steps", intro, arms, config, broken=(common.BROKEN,))
    for title, head, lines in make_tables(finished):
        print(f"\n{title}\n\n{common.format_markdown(head, lines)}")


if __name__ == "__main__":
    run_script(weights, changed, runs)
