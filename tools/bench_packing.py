"""Times the training part of an RL step with packed micro-batches and with padded ones, side by side; prints ratios, writes JSON.

    python tools/bench_packing.py                                             # a fixed log-normal mix of lengths
    python tools/bench_packing.py --lengths gsm8k/test.jsonl --field answer   # the lengths of texts: bytes / 3, about tokens

A made-up Qwen3 model with random weights on this process's device. A step is what the loop does with a rollout: the log-probs of all
answers, then one optimizer step on them. All ways get the same sequences:

    packed           this project's: sequences end to end, at most --tokens in a micro-batch
    padded           --rows sequences in a micro-batch, in the order sampled, padded to the longest of them
    padded, sorted   the same, longest first, so that neighbours are of like length

The ways take turns; medians are shown, and ratios of a turn's own pair. On a CPU the seconds are the processor's, of one thread, which
other programs on the machine hardly change.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_step import PRECISIONS, actor, loss
from torch.nn.utils.rnn import pad_sequence

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import ArchitectureConfig, TrainConfig
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.model import start_megatron, stop_megatron
from parallel.layout import Layout

_BYTES_PER_TOKEN = 3
"""About what the tokenizers of Llama 3 and Qwen make of worked mathematics."""
_MEDIAN, _SIGMA = 100, 0.7
_PROMPT = 48
_VOCABULARY = 250


def answer_lengths(file: Path | None, field: str, count: int, longest: int) -> list[int]:
    """Tokens of `count` answers, drawn with a fixed seed."""
    chosen = random.Random(0)
    if file is None:
        found = [chosen.lognormvariate(math.log(_MEDIAN), _SIGMA) for _ in range(count)]
    else:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not rows or any(not isinstance(row.get(field), str) for row in rows):
            raise typer.BadParameter(f"{file} has lines without a text {field!r}; name its key with --field", param_hint="--field")
        found = [len(row[field].encode()) / _BYTES_PER_TOKEN for row in chosen.choices(rows, k=count)]
    return [min(max(round(length), 2), longest) for length in found]


def random_sequences(lengths: list[int]) -> list[TrainingSample]:
    chosen = random.Random(1)
    return [
        TrainingSample(chosen.choices(range(_VOCABULARY), k=_PROMPT), chosen.choices(range(_VOCABULARY), k=length)) for length in lengths
    ]


def padded(trained: Actor, rows: int, longest_first: bool) -> Actor:
    """The same actor, with micro-batches of `rows` sequences that its model computes as a batch [b, s]."""
    lay = trained.make_micro_batches

    def make_micro_batches(sequences: list[TrainingSample]) -> list[MicroBatch]:
        order = sorted(range(len(sequences)), key=lambda index: -sequences[index].length if longest_first else index)
        return [lay_out(order[start : start + rows], sequences) for start in range(0, len(order), rows)]

    def lay_out(part: list[int], sequences: list[TrainingSample]) -> MicroBatch:
        (batch,) = lay([sequences[index] for index in part])
        return replace(batch, sample_indices=[part[row] for row in batch.sample_indices])

    def forward(batch: MicroBatch) -> torch.Tensor:
        tokens = pad_sequence(list(batch.tokens[0].split(batch.lengths)), batch_first=True)
        places = torch.arange(tokens.shape[1])
        logits = trained._forward_chunks[0](tokens, places.expand(tokens.shape).contiguous(), None)
        return logits[places < torch.tensor(batch.lengths)[:, None]].unsqueeze(0)

    trained.micro_batch_tokens = 1 << 60  # one row for each part
    trained.make_micro_batches, trained.forward = make_micro_batches, forward  # type: ignore[method-assign]
    return trained


def padding(batches: list[MicroBatch], packed: bool) -> float:
    """Share of places that hold no token."""
    used = sum(sum(batch.lengths) - batch.padding for batch in batches)
    return 1 - used / sum(sum(batch.lengths) if packed else len(batch.lengths) * max(batch.lengths) for batch in batches)


def step(trained: Actor, sequences: list[TrainingSample]) -> tuple[float, torch.Tensor]:
    """Seconds of the log-probs and an optimizer step; the log-probs of all answers."""
    start = _now()
    logprobs, _ = trained.compute_logprobs(sequences)
    trained.update(sequences, loss)
    return _now() - start, torch.cat(logprobs)


def _now() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main(
    lengths: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="JSON lines with a text each.")] = None,
    field: Annotated[str, typer.Option(help="The text's key.")] = "answer",
    count: Annotated[int, typer.Option(min=1, help="Sequences of the step.")] = 32,
    longest: Annotated[int, typer.Option(min=2, help="Tokens at which answers are cut.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="train.micro_batch_tokens of the packed way.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in a padded micro-batch.")] = 8,
    precision: Annotated[str, typer.Option(help=" or ".join(PRECISIONS))] = "fp8",
    layers: int = 2,
    hidden: int = 256,
    repeat: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measures and prints."""
    widths = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": 128}
    architecture = ArchitectureConfig(**widths, num_attention_heads=max(hidden // 128, 2), num_key_value_heads=2)
    answers = answer_lengths(lengths, field, count, longest)
    sequences = random_sequences(answers)
    start_megatron(Layout(), seed=0)
    torch.set_num_threads(1)

    def new() -> Actor:
        return actor(architecture, PRECISIONS[precision], TrainConfig(learning_rate=1e-6, micro_batch_tokens=tokens))

    ways = {"packed": new(), "padded": padded(new(), rows, False), "padded, sorted": padded(new(), rows, True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    first = {name: step(trained, sequences)[1] for name, trained in ways.items()}  # not timed: it allocates
    for _ in range(repeat):
        for name, trained in ways.items():
            seconds[name].append(step(trained, sequences)[0])
    what = lengths.name if lengths else f"log-normal, median {_MEDIAN}, sigma {_SIGMA}"
    typer.echo(f"{what}: {count} answers of {min(answers)} to {max(answers)} tokens, mean {statistics.mean(answers):.0f}; {precision}")
    found: dict[str, dict[str, Any]] = {}
    for name, trained in ways.items():
        times = statistics.median(one / other for one, other in zip(seconds[name], seconds["packed"], strict=True))
        batches = trained.make_micro_batches(sequences)
        share, apart = padding(batches, name == "packed"), float((first[name] - first["packed"]).abs().max())
        found[name] = {"seconds": statistics.median(seconds[name]), "times_packed": times, "padding": share, "logprobs_apart": apart}
        typer.echo(
            f"{name:15} {found[name]['seconds']:8.3f} s   {times:5.2f}x of packed   {100 * share:5.1f} % padding   {len(batches)} rows"
        )
    if json_file is not None:
        json_file.write_text(json.dumps({**widths, "lengths": what, "answers": answers, "precision": precision, "ways": found}, indent=1))
    stop_megatron()


if __name__ == "__main__":
    typer.run(main)
