"""Measure how many completions a minute the math reward judges, on texts made from GSM8K's published solutions; print a table.

    python tools/bench/rewards.py FILE [--workers N] [--count N]

FILE is a JSONL file of GSM8K's rows. Every kind of text is judged by itself and all are judged mixed in equal shares; starting the
workers is not counted.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.data.sets import read_problem_set
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.types import Problem

KINDS: dict[str, Callable[[str, str], str]] = {
    "right, after ####": lambda steps, gold: f"{steps}\n#### {gold}",
    "wrong, after ####": lambda steps, gold: f"{steps}\n#### {gold}1",
    "right, in words": lambda steps, gold: f"{steps} So that makes {gold} in all.",
    "wrong, in words": lambda steps, gold: f"{steps} So that makes {gold}1 in all.",
    "boxed with a unit": lambda steps, gold: rf"{steps} \boxed{{{gold} \text{{ apples}}}}",
    "cut in the middle": lambda steps, gold: steps[: len(steps) // 2],
    "without a number": lambda steps, gold: "".join(letter for letter in steps if not letter.isdigit()),
    "shuffled words": lambda steps, gold: " ".join(random.Random(steps).sample(words := steps.split(), len(words))),
}


def main(
    file: Annotated[Path, typer.Argument(help="GSM8K's rows, such as its test.jsonl.")],
    workers: Annotated[int, typer.Option(help="Worker processes.")] = 2,
    count: Annotated[int, typer.Option(help="Completions of each kind.")] = 1000,
) -> None:
    """Measure and print."""
    rows = zip(_solutions(file), read_problem_set(DataSourceConfig(source=str(file)), DataConfig(format="gsm8k"), "FILE"), strict=True)
    pairs = list(islice(cycle(rows), count))
    jobs = {kind: [(make(steps, problem.answer), problem) for steps, problem in pairs] for kind, make in KINDS.items()}
    jobs["all, mixed"] = [completion for row in zip(*jobs.values(), strict=True) for completion in row]
    table = Table("completions", "number", "a minute", "correct", "no verdict")
    limits = RewardConfig()
    with RewardPool([("math", {})], workers, limits.timeout, limits.memory_mb) as pool:
        pool.wait_until_ready()
        for kind, completions in jobs.items():
            table.add_row(kind, *_judge(pool, completions))
    table.title = f"{workers} workers"
    Console().print(table)


def _solutions(file: Path) -> list[str]:
    lines = filter(str.strip, file.read_text(encoding="utf-8").split("\n"))
    return [json.loads(line)["answer"].rpartition("####")[0].strip() for line in lines]


def _judge(pool: RewardPool, completions: list[tuple[str, Problem]]) -> tuple[str, ...]:
    """Return a line of the table."""
    texts, problems = zip(*completions, strict=True)
    start = time.perf_counter()
    rewards = [reward for [reward] in pool.score(texts, problems)]
    rate = len(completions) / (time.perf_counter() - start) * 60
    correct, failed = sum(reward.correct for reward in rewards), sum(bool(reward.error) for reward in rewards)
    return f"{len(completions):,}", f"{rate:,.0f}", f"{correct / len(completions):.1%}", f"{failed}"


if __name__ == "__main__":
    typer.run(main)
