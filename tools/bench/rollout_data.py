"""Measure the way of a step's completions from rank 0 to packed micro-batches on every rank: bytes, seconds and memory per token.

    python tools/bench/rollout_data.py                            # 10^5, 10^6, 10^7 tokens to 2 and 4 replicas
    python tools/bench/rollout_data.py --experts 48x8 --tokens 100000,1000000   # with the routing of 48 layers and 8 experts

Rank 0 makes up completions of one prompt token and `--answer` tokens. Then the ranks do what a step does with them, over gloo, a replica
each, one thread each: rewards become advantages and loss weights, samples are dealt out by cost and sent (`share`), and every replica lays
its own into micro-batches, one after the other (`pack`): medians of three steps. Memory is the most that a rank held beside what it held
before, rank 0's completions included. `lists` is the cost on one rank of completions that are lists of Python numbers: pickled, loaded, and
made tensors.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from megatron_rl.config import Config  # sets how threads wait, so it comes before torch

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import typer
from growth_rank import Meter
from rich.console import Console
from rich.table import Table

from megatron_rl.batch.micro_batch import make_micro_batches
from megatron_rl.distributed import is_rank0
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.mcore.model import start_megatron, stop_megatron
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.training.samples import share_samples
from megatron_rl.types import Completion, Problem, Reward
from parallel.layout import Layout

GROUP = 4
MICRO_BATCH = 1 << 14
TURNS = 3


def make_rollout(tokens: int, answer: int, experts: tuple[int, int]) -> RolloutBatch:
    """Return completions of about so many tokens, of half to one and a half times `answer`; `experts`: layers and experts of a token."""
    source, completions = np.random.default_rng(0), list[Completion]()
    for number in range(max(tokens // answer // GROUP, 1) * GROUP):
        length = int(source.integers(answer // 2, answer + answer // 2))
        ids, logprobs = source.integers(0, 1 << 17, length, dtype=np.int32), source.random(length, np.float32)
        routing = np.tile(np.arange(experts[1], dtype=np.uint8), (length, experts[0], 1)) if experts[0] else None
        reward, problem = Reward(float(number % 2), True), Problem(str(number), "", "")
        completion = Completion(problem, ids[:1], ids, logprobs, "stop", 0, "", reward, routed_experts_T=routing)
        completion.version_lags_T = np.ones(length, np.uint8)
        completions.append(completion)
    return RolloutBatch(completions, {"ahead/generate": 1.0})


def run_rank(folder: Path, tokens: int, answer: int, experts: tuple[int, int]) -> None:
    """Take one step's completions to micro-batches; write the usage beside the other ranks'."""
    torch.set_num_threads(1)
    start_megatron(Layout(dp=int(os.environ["WORLD_SIZE"])), seed=0)
    config = Config.model_validate({"model": {"path": folder}, "rollout": {"group_size": GROUP}, "log": {"samples": 4}})
    routing = RoutingShape(experts[0], tuple(range(experts[0])), 256, experts[1]) if experts[0] else None
    turns = []
    for turn in range(1 + TURNS):  # the first, with few tokens, opens connections
        meter, seconds = Meter(), dict[str, float]()
        with meter.phase("make"):
            rollouts = [make_rollout(tokens if turn else GROUP * answer, answer, experts)] if is_rank0() else []
        dist.barrier()
        with meter.phase("share"), _time(seconds, "share"):
            samples = share_samples(rollouts, 1, config, routing, attention_length=60_000)
        with meter.phase("pack"), _time(seconds, "pack"):
            for _ in make_micro_batches(samples.own, MICRO_BATCH):
                pass
        memory = max(usage.memory for usage in meter.phases.values())
        turns.append({"tokens": samples.tokens, "memory": memory, "written": meter.phases["share"].written, **seconds})
        del samples
    report = {name: statistics.median(turn[name] for turn in turns[1:]) for name in turns[0]}
    report["memory"] = max(turn["memory"] for turn in turns[1:])  # later turns use again what earlier ones freed
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    stop_megatron()


@contextmanager
def _time(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def measure(ranks: int, tokens: int, answer: int, experts: str) -> list[dict[str, float]]:
    """Return every rank's report of one case."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
        subprocess.run([*launch, folder, str(tokens), str(answer), experts], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def measure_lists(tokens: int) -> tuple[float, float]:
    """Return (bytes, processor seconds) per token of ids, log-probs and versions in lists."""
    source = np.random.default_rng(0)
    lists = [source.integers(0, 1 << 17, tokens).tolist(), source.random(tokens).tolist(), [1] * tokens]
    start = time.process_time()
    pickled = pickle.dumps(lists)
    ids, logprobs, versions = pickle.loads(pickled)
    torch.tensor(ids), torch.tensor(logprobs), torch.tensor([2 - version for version in versions])
    return len(pickled) / tokens, (time.process_time() - start) / tokens


def main(
    tokens: Annotated[str, typer.Option(help="Of a step, separated by commas.")] = "100000,1000000,10000000",
    ranks: Annotated[str, typer.Option(help="Replicas, separated by commas.")] = "2,4",
    answer: Annotated[int, typer.Option(min=4, help="Mean tokens of an answer.")] = 2048,
    experts: Annotated[str, typer.Option(help="LAYERSxEXPERTS of the routing; 0x0 for none.")] = "0x0",
) -> None:
    """Run the cases one after the other, print."""
    table = Table("replicas", "tokens", "sent (bytes a token)", "share (µs a token)", "pack (µs a token)", "memory (bytes a token)")
    for size in map(int, ranks.split(",")):
        for count in map(int, tokens.split(",")):
            reports = measure(size, count, answer, experts)
            first, *others = reports
            whole = first["tokens"]
            cells = [
                f"{sum(report['written'] for report in reports) / whole * size / (size - 1):.2f}",
                f"{1e6 * max(report['share'] for report in reports) / whole:.3f}",
                f"{1e6 * max(report['pack'] for report in reports) / whole:.3f}",
                f"{first['memory'] / whole:.1f} | {max(report['memory'] for report in others) / whole:.1f}",
            ]
            table.add_row(str(size), f"{whole:,.0f}", *cells)
    list_bytes, list_seconds = measure_lists(1_000_000)
    Console(width=150).print(table, "of memory: rank 0 | largest other rank")
    print(f"lists: {list_bytes:.1f} bytes and {1e6 * list_seconds:.2f} µs a token, on every rank")


def _parse_experts(text: str) -> tuple[int, int]:
    layers, _, experts = text.partition("x")
    return int(layers), int(experts)


if __name__ == "__main__":
    if "RANK" in os.environ:
        arguments: Any = sys.argv[1:]
        run_rank(Path(arguments[0]), int(arguments[1]), int(arguments[2]), _parse_experts(arguments[3]))
    else:
        typer.run(main)
