"""Times one optimizer step of the trainer in three precisions, side by side: emulated FP8, BF16 and FP32; prints ratios, writes JSON.

    python tools/bench_step.py [--layers 2] [--hidden 512] [--tokens 1024] [--json FILE]

A made-up Qwen3 model with random weights on this process's device. A step is forward, backward, Adam and, in FP8, quantising the
weights. The three take turns, so that a busy machine slows all of them; medians are shown.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import ArchitectureConfig, PrecisionConfig, TrainConfig
from megatron_rl.hf.create import make_hf_config
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout

PRECISIONS = {
    "fp8": PrecisionConfig(mode="fp8_unified", high="bf16"),
    "bf16": PrecisionConfig(mode="bf16", high="bf16"),
    "fp32": PrecisionConfig(mode="bf16", high="fp32"),
}


def main(
    layers: int = 2,
    hidden: int = 512,
    tokens: int = 1024,
    repeat: int = 5,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measures and prints."""
    widths = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": 128}
    architecture = ArchitectureConfig(**widths, num_attention_heads=max(hidden // 128, 2), num_key_value_heads=2)
    start_megatron(Layout(), seed=0)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would be measured
    actors = {name: actor(architecture, precision, TrainConfig(learning_rate=1e-6)) for name, precision in PRECISIONS.items()}
    length = 128
    batch = [sequence(length, seed) for seed in range(max(tokens // length, 1))]
    seconds: dict[str, list[float]] = {name: [] for name in actors}
    for turn in range(repeat + 1):
        for name, trained in actors.items():
            start = time.perf_counter()
            trained.update(batch, loss)
            if turn:  # the first one allocates
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        typer.echo(f"{name:5} {median:8.3f} s per step   {median / medians['bf16']:5.2f}x of BF16")
    if json_file is not None:
        json_file.write_text(json.dumps({**widths, "tokens": len(batch) * length, "seconds": medians}, indent=1))
    stop_megatron()


def actor(architecture: ArchitectureConfig, precision: PrecisionConfig, train: TrainConfig) -> Actor:
    """An actor with random weights."""
    contract = PrecisionContract.from_config(precision)
    model = build_model(make_hf_config(architecture, 0, precision.high), Layout(), contract)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.02 if parameter.dim() > 1 else torch.ones(parameter.shape)
            )
    return Actor(model, train, temperature=1.0)


def sequence(length: int, seed: int) -> TrainingSample:
    ids = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return TrainingSample(ids[: length // 2], ids[length // 2 :])


def loss(logprobs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * batch.mask).sum(), {}


if __name__ == "__main__":
    typer.run(main)
