"""Time generation ahead of a trainer with and without a barrier between steps, on answers of very different lengths; print ratios.

    python tools/bench/streaming.py configs/quickstart.toml --model.path=MODEL

A real engine with made-up weights; of the model's folder only config.json and tokenizer are read. Every answer has a length of its own,
drawn from a log-normal distribution cut at `--longest` tokens, as lengths of reasoning are. The trainer is a pause of `--train` times the
seconds that a step takes alone with a barrier; it takes no processor from the engine, as on GPUs of its own. No weights are synced.

barrier: the groups of a step begin when those of the step before have all ended (but generation runs ahead of training, by one step).
streaming: as a run does it, with `placement.max_staleness` of 1, 2 and so on. `+ n`: with `rollout.over_sampling_prompts = n`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.config import Config, load_config
from megatron_rl.data import ProblemOrder, ProblemStream
from megatron_rl.hf.files import read_config
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import pin_model
from megatron_rl.rollout.async_worker import AsyncRolloutWorker
from megatron_rl.rollout.engine import Abort
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.worker import RolloutWorker
from megatron_rl.types import Generation, Problem, Reward, SamplingParams
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec


class DrawnLengths(SGLangEngine):
    """Samples as many tokens as the seed of a completion says, by the policy that the trainer holds."""

    median, sigma, longest, trained = 64.0, 1.0, 512, 0

    def generate(
        self, prompts_B: Sequence[np.ndarray], sampling: SamplingParams | Sequence[SamplingParams], abort: Abort | None = None
    ) -> list[Generation]:
        generations = super().generate(prompts_B, sampling, abort)
        for generation in generations:
            generation.policy_version = self.trained
        return generations

    def _ask(self, prompts_B: Any, parameters: list[dict[str, Any]], *others: Any) -> list[dict[str, Any]]:
        lengths = [random.Random(each["sampling_seed"]).lognormvariate(np.log(self.median), self.sigma) for each in parameters]
        drawn = [
            {**each, "max_new_tokens": max(1, min(self.longest, round(length))), "ignore_eos": True}
            for each, length in zip(parameters, lengths, strict=True)
        ]
        return super()._ask(prompts_B, drawn, *others)


class NoRewards:
    """Judges nothing, at once."""

    def score(self, texts: Sequence[str], *_: Any) -> list[Reward]:
        return [Reward(0.0, False)] * len(texts)


def measure(config: Config, engine: DrawnLengths, tokenizer: Any, steps: int, pause: float, barrier: bool) -> dict[str, float]:
    """Return the seconds of a step and the tokens trained per second, of the whole run, the first step included."""
    staleness = config.placement.max_staleness
    stream = ProblemStream(ProblemOrder(lambda position: Problem(str(position), f"{position} + {position} =", ""), "numbers"))
    worker = RolloutWorker(config, MultiTurnSampler(engine, tokenizer), stream, [], NoRewards())  # type: ignore[arg-type]
    ahead = AsyncRolloutWorker(worker, staleness, steps, lambda: None)
    if barrier:
        ahead._threads = ThreadPoolExecutor(1)  # one step after the other
    try:
        start, tokens = time.perf_counter(), 0
        for version in range(steps):
            engine.trained = version
            rollout = ahead.collect(version)
            time.sleep(pause)
            tokens += sum(completion.sampled_count for completion in rollout.completions_B)
        seconds = time.perf_counter() - start
    finally:
        ahead.close()
    return {"seconds a step": seconds / steps, "tokens per second": tokens / seconds}


def main(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A run's TOML file; --section.key=value may follow.")],
    steps: Annotated[int, typer.Option(min=3)] = 7,
    median: Annotated[float, typer.Option(help="Of the lengths, before they are cut.")] = 64,
    sigma: Annotated[float, typer.Option(help="Standard deviation of their logarithm.")] = 1.0,
    longest: Annotated[int, typer.Option()] = 512,
    train: Annotated[float, typer.Option(min=0, help="Training time of a step, as a share of its generation's.")] = 0.5,
    repeat: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Start the engine, measure all ways in turn, several times, stop it."""
    with TemporaryDirectory(prefix="megatron-rl-streaming-") as name:
        folder = Path(name)
        config = pin_model(load_config(file, context.args))
        contract = PrecisionContract.from_config(config.precision)
        write_all_but_weights(folder, describe_weights(read_config(config.model.folder), contract), config.model.folder)
        engine = DrawnLengths(EngineLaunchSpec(config, folder, folder, 0, arguments=("--load-format", "dummy")))
        engine.median, engine.sigma, engine.longest = median, sigma, longest
        try:
            engine.wait_until_ready()
            tokenizer = load_tokenizer(config.model.folder)
            extra = max(config.rollout.prompts_per_step // 4, 1)
            alone = measure(_with(config, 0, 0), engine, tokenizer, 3, 0.0, True)["seconds a step"]
            print(f"a step alone: {alone:.2f} s; training: {train * alone:.2f} s", flush=True)
            ways = {"barrier": (1, 0, True)}
            ways |= {f"streaming, max_staleness {n}": (n, 0, False) for n in (1, 2, 3)}
            ways |= {f"barrier + {extra}": (1, extra, True), f"streaming, max_staleness 1, + {extra}": (1, extra, False)}
            rows: dict[str, list[dict[str, float]]] = {}
            for _ in range(repeat):
                for way, (staleness, over, barrier) in ways.items():
                    measured = measure(_with(config, staleness, over), engine, tokenizer, steps, train * alone, barrier)
                    rows.setdefault(way, []).append(measured)
        finally:
            engine.stop()
    base = [row["tokens per second"] for row in rows["barrier"]]
    for way, repeats in rows.items():
        ratios = [row["tokens per second"] / first for row, first in zip(repeats, base, strict=True)]
        seconds = statistics.median(row["seconds a step"] for row in repeats)
        print(f"{way:40} {seconds:6.2f} s a step  {statistics.median(ratios):5.2f} x tokens/s")


def _with(config: Config, staleness: int, over: int) -> Config:
    """Return the configuration with these sections' values, for a worker that reads no more."""
    return config.model_copy(
        update={
            "placement": config.placement.model_copy(update={"max_staleness": staleness}),
            "rollout": config.rollout.model_copy(update={"over_sampling_prompts": over}),
        }
    )


if __name__ == "__main__":
    run_script(main)
