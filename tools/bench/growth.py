"""Measure how a trainer's cost grows with the model and the ranks: memory, bytes written, processor seconds.

    python tools/bench/growth.py                          # 1, 2, 4 times the model at tp 2; tp and dp of 1, 2, 4, 8 at twice the model
    python tools/bench/growth.py --cases 1:tp=2,2:tp=2,4:tp=2

Every case is a torchrun job over gloo, one thread a rank, of the real parts (`growth_rank.py`): the ranks load a checkpoint and build the
actor (`start`), compute log-probs and take an optimizer step (`step`), write a checkpoint (`checkpoint`) and make a Hugging Face one of it
(`export`). A row shows rank 0 and the largest other rank: most memory beside the empty process, and bytes written, to other ranks and to
files. The exponents, by least squares over the cases of one family, say how the largest rank follows the parameters a rank holds (1: in
proportion), or the number of replicas (0: not at all).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_random_checkpoint
from parallel.layout import Layout, parse_sizes

FIELDS = ("memory", "written", "seconds")
_WIDTHS = ArchitectureConfig(
    hidden_size=1024, intermediate_size=3072, num_attention_heads=8, num_key_value_heads=8, vocab_size=1024, num_hidden_layers=2
)
_SCALE = 2
"""Of the model of the families of layouts."""
_CASES = "1:tp=2,2:tp=2,4:tp=2,2:tp=1,2:tp=4,2:tp=8,2:dp=2,2:dp=4,2:dp=8"

Usage = dict[str, dict[str, float]]
"""Phase -> field of `growth_rank.Usage` -> value."""


def measure(scale: int, sizes: str, tokens: int) -> list[Usage]:
    """Run one case; return every rank's usage. `scale` multiplies the layers."""
    ranks = _layout(sizes).world_size
    with tempfile.TemporaryDirectory() as name:
        widths = _WIDTHS.model_copy(update={"num_hidden_layers": scale * _WIDTHS.num_hidden_layers})
        (Path(name) / "model").mkdir()
        make_random_checkpoint(Path(name) / "model", widths, seed=0)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        rank = [str(Path(__file__).with_name("growth_rank.py")), name, sizes, str(tokens)]
        subprocess.run([*launch, *rank], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [json.loads((Path(name) / f"rank{number}.json").read_text()) for number in range(ranks)]


def _layout(sizes: str) -> Layout:
    return Layout(**parse_sizes("--cases", sizes, ("tp", "pp", "dp", "ep", "cp")))


def count_share(scale: int, sizes: str) -> float:
    """Return the million parameters of a rank."""
    layout, hidden, ffn = _layout(sizes), _WIDTHS.hidden_size, _WIDTHS.intermediate_size
    layers = scale * _WIDTHS.num_hidden_layers * (4 * hidden**2 + 3 * hidden * ffn)
    return (layers + 2 * _WIDTHS.vocab_size * hidden) / (layout.tp * layout.pp) / 1e6


def fit_exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return b of y = a * x^b, by least squares of the logarithms."""
    log_x, log_y = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_x, mean_y = sum(log_x) / len(log_x), sum(log_y) / len(log_y)
    products = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_x, log_y, strict=True))
    return products / sum((x - mean_x) ** 2 for x in log_x)


def print_rows(console: Console, results: dict[tuple[int, str], list[Usage]]) -> None:
    """Print a row for each case and phase."""
    table = Table("layers", "layout", "M params a rank", "phase", "memory (MB)", "written (MB)", "CPU s")
    for (scale, sizes), ranks in results.items():
        for phase in ranks[0]:
            cells = []
            for field in FIELDS:
                unit = 1 if field == "seconds" else 1e6
                first, others = ranks[0][phase][field] / unit, [rank[phase][field] / unit for rank in ranks[1:]]
                cells.append(f"{first:,.1f}" + (f" | {max(others):,.1f}" if others else ""))
            layers = str(scale * _WIDTHS.num_hidden_layers)
            table.add_row(layers, sizes, f"{count_share(scale, sizes):.1f}", phase, *cells)
    console.print(table, "rank 0 | largest other rank")


def print_exponents(console: Console, results: dict[tuple[int, str], list[Usage]]) -> None:
    """Print the exponents of each family that has two cases or more."""
    table = Table("family", "phase", *FIELDS)
    families: dict[str, dict[tuple[int, str], float]] = {"layers at tp=2": {}, "tp": {}, "dp": {}}
    for scale, sizes in results:
        kind = "dp" if sizes.startswith("dp") else "tp"
        if sizes == "tp=2":
            families["layers at tp=2"][scale, sizes] = count_share(scale, sizes)
        if scale == _SCALE:
            families[kind][scale, sizes] = _layout(sizes).dp if kind == "dp" else count_share(scale, sizes)
    for name, cases in families.items():
        if len(set(cases.values())) < 2:
            continue
        for phase in next(iter(results.values()))[0]:
            largest = {field: [max(rank[phase][field] for rank in results[case]) for case in cases] for field in FIELDS}
            table.add_row(name, phase, *(_show_exponent(list(cases.values()), values) for values in largest.values()))
    console.print(table)


def _show_exponent(xs: Sequence[float], ys: Sequence[float]) -> str:
    return f"{fit_exponent(xs, ys):+.2f}" if min(ys) > 0 else "-"


def main(
    cases: Annotated[str, typer.Option(help="SCALE:LAYOUT, separated by commas.")] = _CASES,
    tokens: Annotated[int, typer.Option(min=64, help="Of the step.")] = 1024,
) -> None:
    """Run the cases one after the other, print."""
    results = {}
    for case in cases.split(","):
        scale, _, sizes = case.partition(":")
        results[int(scale), sizes] = measure(int(scale), sizes, tokens)
    console = Console(width=150)
    print_rows(console, results)
    print_exponents(console, results)


if __name__ == "__main__":
    typer.run(main)
