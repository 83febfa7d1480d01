"""Time one optimizer step of the trainer in three precisions, side by side: emulated FP8, BF16 and FP32; print ratios, write JSON.

    python tools/bench/optimizer_step.py [--layers 2] [--hidden 512] [--tokens 1024] [--json FILE]

A made-up Qwen3 model with random weights on this process's device. A step is forward, backward, Adam and, in FP8, quantizing the
weights. The three take turns, so that a busy machine slows all of them; medians are shown.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from models import PRECISIONS, compute_loss, describe_widths, make_actor, make_architecture, make_sample

from megatron_rl.config import TrainConfig
from megatron_rl.mcore.model import start_megatron, stop_megatron
from parallel.layout import Layout

_LENGTH = 128


def main(
    layers: int = 2,
    hidden: int = 512,
    tokens: int = 1024,
    repeat: int = 5,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print."""
    architecture = make_architecture(layers, hidden)
    start_megatron(Layout(), seed=0)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would be measured
    actors = {name: make_actor(architecture, precision, TrainConfig(learning_rate=1e-6)) for name, precision in PRECISIONS.items()}
    batch = [make_sample(_LENGTH, seed) for seed in range(max(tokens // _LENGTH, 1))]
    seconds: dict[str, list[float]] = {name: [] for name in actors}
    for turn in range(repeat + 1):
        for name, actor in actors.items():
            start = time.perf_counter()
            actor.update(batch, compute_loss)
            if turn:  # the first one allocates
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        typer.echo(f"{name:5} {median:8.3f} s per step   {median / medians['bf16']:5.2f}x of BF16")
    if json_file is not None:
        report = {**describe_widths(architecture), "tokens": len(batch) * _LENGTH, "seconds": medians}
        json_file.write_text(json.dumps(report, indent=1))
    stop_megatron()


if __name__ == "__main__":
    typer.run(main)
