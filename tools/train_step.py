"""Time the trainer's part of an RL step on this machine, by phase and optionally by operator. Needs no engine.

    python tools/train_step.py configs/gsm8k.toml --model.path=MODEL --tokens 3300
    python tools/train_step.py configs/quickstart.toml --tokens 3300 --prompt 16 --answer 12 --operators 20
    torchrun --nproc-per-node 2 tools/train_step.py configs/gsm8k.toml --model.path=MODEL --train.layout.tp=2 \
        --against precision.reduction=fast

The sections `model`, `precision`, `train`, and `algorithm` of the configuration apply. Samples are random tokens with advantages of both
signs. On a busy machine, CPU seconds say more than the clock; under torchrun they are those of rank 0. The first step, a warm-up, is not
shown. `digest` is a hash of the log-probs: two source trees that print the same digest compute the same forward pass. With `--against`,
steps with one changed setting alternate with the others, and the last line shows the ratio of their times.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_rl.config import Config, load_config  # sets how threads wait, so it comes before torch

# isort: split
import torch
from harness import JsonFile, write_json
from torch.profiler import ProfilerActivity, profile

from megatron_rl.algorithm.loss_weights import assign_loss_weights
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.cli.main import run_script
from megatron_rl.distributed import is_rank0
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Actor, Policy
from megatron_rl.mcore.model import build_model, freeze, start_megatron, stop_megatron
from megatron_rl.mcore.weights.load_weights import build_rank_shards, load_checkpoint
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import pin_model


def make_samples(tokens: int, prompt: int, answer: int, vocabulary: int) -> list[TrainingSample]:
    """Return random samples with at least `tokens` positions in total; `prompt` and `answer` are mean lengths."""
    generator, samples = random.Random(0), list[TrainingSample]()
    while sum(sample.length - 1 for sample in samples) < tokens:
        lengths = (max(1, round(mean * generator.uniform(0.5, 1.5))) for mean in (prompt, answer))
        prompt_ids, answer_ids = (torch.tensor(generator.choices(range(vocabulary), k=length)) for length in lengths)
        samples.append(TrainingSample(prompt_ids, answer_ids, advantage=(-1.0) ** len(samples)))
    return samples


class Step:
    """The trainer's part of an RL step: log-probs and one optimizer step."""

    def __init__(self, config: Config, samples: list[TrainingSample]) -> None:
        self.config, self.samples, self.layout = config, samples, config.train.layout.to_layout()
        self.seconds: dict[str, tuple[float, float]] = {}
        self.actor = Actor(self._load(), config.train, config.rollout.temperature)
        scored = freeze(self._load()) if config.algorithm.kl_coef else None
        self.reference = Policy(scored, config.rollout.temperature, config.train.micro_batch_tokens) if scored else None

    def _load(self) -> Any:
        hf_config, contract = read_config(self.config.model.folder), PrecisionContract.from_config(self.config.precision)
        model = build_model(hf_config, self.layout, contract, self.config.train)
        load_checkpoint(model, self.config.model.folder, build_rank_shards(hf_config, self.layout))
        return model

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start, used = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = time.perf_counter() - start, time.process_time() - used

    def run(self) -> str:
        """Take the step and return the digest of the log-probs. Sets `seconds`: phase -> (clock, CPU)."""
        with self._phase("log-probs"):
            logprobs_B, _ = self.actor.compute_logprobs(self.samples)
        with self._phase("reference"):
            reference_B = self.reference.compute_logprobs(self.samples)[0] if self.reference else logprobs_B
        for sample, old, reference in zip(self.samples, logprobs_B, reference_B, strict=True):
            sample.old_logprobs, sample.reference_logprobs = old, reference
        assign_loss_weights(self.samples, self.config.algorithm.aggregate, self.config.rollout.max_new_tokens)
        with self._phase("update"):
            self.actor.update(self.samples, PolicyLoss(self.config.algorithm))
        return hashlib.sha256(torch.cat(logprobs_B).numpy().tobytes()).hexdigest()[:12]


def print_on_rank0(text: str) -> None:
    if is_rank0():
        print(text)


def sum_seconds(rows: list[dict[str, dict[str, float]]], kind: str) -> float:
    return sum(phase[kind] for row in rows for phase in row.values())


def main(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="TOML file of a run; --section.key=value may follow.")],
    tokens: Annotated[int, typer.Option(min=1, help="Positions of all samples.")] = 3300,
    prompt: Annotated[int, typer.Option(min=1, help="Mean length.")] = 90,
    answer: Annotated[int, typer.Option(min=1, help="Mean length.")] = 90,
    threads: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    repeat: Annotated[int, typer.Option(min=1)] = 2,
    against: Annotated[str | None, typer.Option(help="A setting to compare with, as section.key=value.")] = None,
    operators: Annotated[int, typer.Option(min=0, help="Print this many rows of a torch profile of the last step.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Time optimizer steps and print seconds by phase."""
    config = pin_model(load_config(file, context.args))
    start_megatron(config.train.layout.to_layout(), config.train.seed)
    torch.set_num_threads(threads)
    samples = make_samples(tokens, prompt, answer, read_config(config.model.folder)["vocab_size"])
    steps, rows = [Step(config, samples)], []
    if against:
        steps.append(Step(pin_model(load_config(file, [*context.args, f"--{against}"])), samples))
    for step in steps:
        step.run()
    for number in range(1, repeat + 1):
        profiled = operators and number == repeat
        with profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext() as trace:
            digests = [step.run() for step in steps]
        for step, digest in zip(steps, digests, strict=True):
            rows.append({name: {"clock": clock, "processor": used} for name, (clock, used) in step.seconds.items()})
            phases = "  ".join(f"{name} {clock:.2f} s ({used:.2f} CPU s)" for name, (clock, used) in step.seconds.items())
            print_on_rank0(f"{phases}  digest {digest}")
        if trace is not None:
            print_on_rank0(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=operators, max_name_column_width=60))
    if against:
        clock, used = (sum_seconds(rows[::2], kind) / sum_seconds(rows[1::2], kind) for kind in ("clock", "processor"))
        print_on_rank0(f"against {against}: {clock:.3f} of the clock, {used:.3f} of the processor")
    if is_rank0():
        write_json(json_file, rows)
    stop_megatron()


if __name__ == "__main__":
    run_script(main)
