"""Measure on the host what planning a sync and comparing its digests cost one trainer rank, beside a rank that does so for all ranks.

    python tools/sync_plan.py configs/qwen3_235b_a22b.toml --train.layout.dp=2 --rollout.engines=32

Every figure comes from a fresh process, as in a run. "All ranks" plans every transfer and compares the digest of every chunk; "own" is the
largest of the first rank, the last one, and two between. The share of the proof is what a rank does for it, hashing its bytes at the GPU's
bandwidth and folding their digests, relative to sending its bytes at a node's network bandwidth per GPU, which a real sync does not exceed.
"""

import json
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import typer

from megatron_rl.cli.main import run_script
from megatron_rl.config import Config
from megatron_rl.config.loading import load_config
from megatron_rl.cost.hardware import GPUS, NETWORK_BANDWIDTH
from megatron_rl.hf.files import read_config
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.checks import check_coverage
from megatron_rl.sync.plan import SyncPlan
from parallel.chunking import Chunk
from parallel.proof_root import fold_digests

_DIGEST = "0123456789abcdef" * 2


class Cost(NamedTuple):
    plan: float  # seconds
    proof: float  # seconds of comparing digests, once they are known
    numbers: int  # bytes of digests or roots that the rank receives in each sync
    sent: int  # bytes of weights
    hashed: int  # bytes of weights; engines that get the same bytes share a digest


Source = tuple[Path, list[str]]
"""A configuration's file and options."""


def make_plan(source: Source, rank: int | None) -> SyncPlan:
    config: Config = load_config(*source)
    geometry, contract = config.make_geometry(read_config(config.model.folder)), PrecisionContract.from_config(config.precision)
    train, rollout = config.train.layout.to_layout(), config.rollout.to_layout()
    return SyncPlan.make(geometry, train, rollout, contract, config.sync.chunk_bytes, rank)


def time_call(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure_all(source: Source, target: int) -> tuple[Cost, str]:
    """Return what every rank pays if it plans for all, and compares the digests of all chunks; and what engine rank `target` gets."""
    seconds, plan = time_call(lambda: make_plan(source, None))
    text = json.dumps({number: _DIGEST for number in range(len(plan.chunks))})

    def compare() -> bool:
        sent, arrived = json.loads(text), iter(json.loads(text).values())
        return all(sent[str(number)] == next(arrived) for number in range(len(plan.chunks)))

    received = json.dumps([[chunk.buffer, chunk.source, chunk.to_json()] for chunk in plan.chunks if chunk.target == target])
    return Cost(seconds, time_call(compare)[0], 2 * len(text), 0, 0), received


def measure_own(source: Source, rank: int) -> Cost:
    """Return what trainer rank `rank` pays for what it sends."""
    seconds, plan = time_call(lambda: make_plan(source, rank))

    def fold() -> list[list[int]]:
        by_target: dict[int, list[tuple[int, str]]] = {target: [] for target in range(len(plan.targets))}
        for chunk in plan.chunks:
            by_target[chunk.target].append((rank, _DIGEST))
        return [fold_digests(target, own) for target, own in by_target.items()]

    proof, roots = time_call(fold)
    hashed = {chunk.sources: chunk.nbytes for chunk in plan.chunks}
    return Cost(seconds, proof, sum(8 * len(root) for root in roots), sum(c.nbytes for c in plan.chunks), sum(hashed.values()))


def measure_check(source: Source, target: int, text: str) -> float:
    """Return the seconds in which a trainer rank puts the chunks of engine rank `target` in order and checks that they are its weights."""
    plan = make_plan(source, 0)

    def check() -> None:
        entries = sorted(json.loads(text), key=lambda each: each[:2])
        check_coverage(plan, {target: [Chunk.from_json(target, fields) for _, _, fields in entries]})

    return time_call(check)[0]


def main(context: typer.Context, config_file: Path) -> None:
    """Measure one configuration; options such as --train.layout.dp=2 change it."""
    source = config_file, context.args
    config: Config = load_config(*source)
    world, hbm = config.train.layout.to_layout().world_size, GPUS["h100"].hbm
    target = config.rollout.engines * config.rollout.tp - 1
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        everything, received = pool.apply(measure_all, (source, target))
        ranks = sorted({0, world // 3, 2 * world // 3, world - 1})
        costs = [pool.apply(measure_own, (source, rank)) for rank in ranks]
        check = pool.apply(measure_check, (source, target, received))
    own = Cost(*map(max, zip(*costs, strict=True)))
    share = max((cost.hashed / hbm + cost.proof) / (cost.sent / NETWORK_BANDWIDTH) for cost in costs)
    print(f"{config_file.stem}, {world} trainer ranks, {config.rollout.engines * config.rollout.tp} engine ranks")
    print(f"plan: all ranks {everything.plan:.2f} s, own {own.plan:.2f} s, ratio {everything.plan / own.plan:.0f}")
    print(f"check of one engine rank at the start: {check:.2f} s")
    print(f"comparing digests: all ranks {1e3 * everything.proof:.1f} ms, own {1e3 * own.proof:.1f} ms")
    print(f"bytes of digests to every rank: all ranks {everything.numbers:,}, own {own.numbers:,}")
    print(f"proof: {share:.2%} of sending {own.sent / 1e9:.1f} GB, of which {own.hashed / 1e9:.1f} GB are hashed")


if __name__ == "__main__":
    run_script(main)
