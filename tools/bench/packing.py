"""Time the training part of an RL step with packed micro-batches and with padded ones, side by side; print ratios, write JSON.

    python tools/bench/packing.py                                             # a fixed log-normal mix of lengths
    python tools/bench/packing.py --lengths gsm8k/test.jsonl --field answer   # the lengths of texts: bytes / 3, about tokens

A made-up Qwen3 model with random weights on this process's device. A step is what the loop does with a rollout: the log-probs of all
answers, then one optimizer step on them. All methods get the same samples:

    packed           this project's: sequences end to end, at most --tokens in a micro-batch
    padded           --rows sequences in a micro-batch, in the order sampled, padded to the longest of them
    padded, sorted   the same, longest first, so that neighbours are of like length

The methods take turns; medians are shown, and ratios of a turn's own pair. On a CPU the seconds are the processor's, of one thread, which
other programs on the machine hardly change.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn.utils.rnn import pad_sequence

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import PrecisionConfig, TrainConfig
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.layers.linear.quantized_linear import fill_weights
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout

PRECISIONS = {
    "fp8": PrecisionConfig(mode="fp8_unified", high="bf16"),
    "bf16": PrecisionConfig(mode="bf16", high="bf16"),
    "fp32": PrecisionConfig(mode="bf16", high="fp32"),
}

_BYTES_PER_TOKEN = 3
"""About what the tokenizers of Llama 3 and Qwen make of worked mathematics."""
_MEDIAN, _SIGMA = 100, 0.7
_PROMPT = 48
_VOCABULARY = 250


def draw_answer_lengths(file: Path | None, field: str, count: int, longest: int) -> list[int]:
    """Draw the tokens of `count` answers, with a fixed seed: of a log-normal distribution, or of the texts of a JSON lines file."""
    generator = random.Random(0)
    if file is None:
        lengths = [generator.lognormvariate(math.log(_MEDIAN), _SIGMA) for _ in range(count)]
    else:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not rows or any(not isinstance(row.get(field), str) for row in rows):
            raise typer.BadParameter(f"{file} has lines without a text {field!r}; name its key with --field", param_hint="--field")
        lengths = [len(row[field].encode()) / _BYTES_PER_TOKEN for row in generator.choices(rows, k=count)]
    return [min(max(round(length), 2), longest) for length in lengths]


def make_actor(architecture: ArchitectureConfig, precision: PrecisionConfig, train: TrainConfig) -> Actor:
    """Return an actor with random weights. Megatron must be started."""
    model: Any = build_model(make_hf_config(architecture, 0, precision.high), Layout(), PrecisionContract.from_config(precision))

    def draw(shape: torch.Size, number: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.02 if len(shape) > 1 else torch.ones(shape)

    fill_weights(model, draw)
    return Actor(model, train, temperature=1.0)


def make_samples(lengths: list[int]) -> list[TrainingSample]:
    """Return samples of random tokens with answers of these lengths."""
    generator = torch.Generator().manual_seed(1)
    ids = (torch.randint(_VOCABULARY, (_PROMPT + length,), generator=generator) for length in lengths)
    return [TrainingSample(sample[:_PROMPT], sample[_PROMPT:]) for sample in ids]


class PaddedMicroBatches(list[MicroBatch]):
    @property
    def widths(self) -> list[int]:
        return [batch.tokens.shape[1] for batch in self]


def pad_micro_batches(actor: Actor, rows: int, longest_first: bool) -> Actor:
    """Return the same actor with micro-batches of `rows` samples that its model computes as a padded batch [b, s]."""
    make_packed = actor.make_micro_batches

    def make_micro_batches(samples: list[TrainingSample], _: int) -> PaddedMicroBatches:
        order = sorted(range(len(samples)), key=lambda index: -samples[index].length if longest_first else index)
        return PaddedMicroBatches(make_one(order[start : start + rows], samples) for start in range(0, len(order), rows))

    def make_one(indices: list[int], samples: list[TrainingSample]) -> MicroBatch:
        (batch,) = make_packed([samples[index] for index in indices])
        return replace(batch, sample_indices=[indices[row] for row in batch.sample_indices])

    def forward(batch: MicroBatch) -> torch.Tensor:
        tokens = pad_sequence(list(batch.tokens[0].split(batch.lengths)), batch_first=True)
        positions = torch.arange(tokens.shape[1])
        logits = actor._forward_chunks[0](tokens, positions.expand(tokens.shape).contiguous(), None)
        return logits[positions < torch.tensor(batch.lengths)[:, None]].unsqueeze(0)

    actor.micro_batch_tokens = 1 << 60  # one packed row for each padded batch
    actor.make_micro_batches, actor.forward = make_micro_batches, forward  # type: ignore[method-assign, assignment]
    return actor


def compute_padding(batches: Iterable[MicroBatch], packed: bool) -> float:
    """Return the share of positions that hold no token."""
    used = sum(sum(batch.lengths) - batch.padding for batch in batches)
    return 1 - used / sum(sum(batch.lengths) if packed else len(batch.lengths) * max(batch.lengths) for batch in batches)


def compute_loss(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the negative log-likelihood of the answers' tokens."""
    return -(logprobs * batch.mask).sum(), {}


def time_step(actor: Actor, samples: list[TrainingSample]) -> tuple[float, torch.Tensor]:
    """Return the seconds of the log-probs and an optimizer step, and the log-probs of all answers."""
    start = _now()
    logprobs, _ = actor.compute_logprobs(samples)
    actor.update(samples, compute_loss)
    return _now() - start, torch.cat(logprobs)


def _now() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main(
    lengths: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="JSON lines with a text each.")] = None,
    field: Annotated[str, typer.Option(help="The text's key.")] = "answer",
    count: Annotated[int, typer.Option(min=1, help="Samples of the step.")] = 32,
    longest: Annotated[int, typer.Option(min=2, help="Tokens at which answers are cut.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="train.micro_batch_tokens of the packed method.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Samples in a padded micro-batch.")] = 8,
    precision: Annotated[str, typer.Option(help=" or ".join(PRECISIONS))] = "fp8",
    layers: int = 2,
    hidden: int = 256,
    repeat: Annotated[int, typer.Option(min=1)] = 3,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Measure and print."""
    widths: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": 128}
    architecture = ArchitectureConfig(**widths, num_attention_heads=max(hidden // 128, 2), num_key_value_heads=2)
    answers = draw_answer_lengths(lengths, field, count, longest)
    samples = make_samples(answers)
    start_megatron(Layout(), seed=0)
    torch.set_num_threads(1)

    def new_actor() -> Actor:
        return make_actor(architecture, PRECISIONS[precision], TrainConfig(learning_rate=1e-6, micro_batch_tokens=tokens))

    actors = {
        "packed": new_actor(),
        "padded": pad_micro_batches(new_actor(), rows, False),
        "padded, sorted": pad_micro_batches(new_actor(), rows, True),
    }
    seconds: dict[str, list[float]] = {method: [] for method in actors}
    logprobs = {method: time_step(actor, samples)[1] for method, actor in actors.items()}  # not timed: it allocates
    for _ in range(repeat):
        for method, actor in actors.items():
            seconds[method].append(time_step(actor, samples)[0])
    source = lengths.name if lengths else f"log-normal, median {_MEDIAN}, sigma {_SIGMA}"
    typer.echo(f"{source}: {count} answers of {min(answers)} to {max(answers)} tokens, mean {statistics.mean(answers):.0f}; {precision}")
    figures: dict[str, dict[str, Any]] = {}
    for method, actor in actors.items():
        batches = actor.make_micro_batches(samples)
        ratio = statistics.median(own / packed for own, packed in zip(seconds[method], seconds["packed"], strict=True))
        median, padding = statistics.median(seconds[method]), compute_padding(batches, method == "packed")
        difference = float((logprobs[method] - logprobs["packed"]).abs().max())
        figures[method] = {"seconds": median, "times_packed": ratio, "padding": padding, "logprobs_apart": difference}
        typer.echo(f"{method:15} {median:8.3f} s   {ratio:5.2f}x of packed   {100 * padding:5.1f} % padding   {len(batches)} rows")
    if json_file is not None:
        report = {**widths, "lengths": source, "answers": answers, "precision": precision, "ways": figures}
        json_file.write_text(json.dumps(report, indent=1))
    stop_megatron()


if __name__ == "__main__":
    typer.run(main)
