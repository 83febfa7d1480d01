"""The real loop with a real engine that generates ahead: on top of `support.served`, in the same one rank of a `World`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.data import load_problems
from megatron_rl.data.byte_tokenizer import load_tokenizer
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.async_worker import AsyncRolloutWorker
from megatron_rl.rollout.worker import RolloutBatch, RolloutWorker
from megatron_rl.sync.recovery import RecoveringWeightSync
from megatron_rl.training.colocation import ColocationManager
from megatron_rl.training.loop import Loop
from megatron_rl.types import Reward, SamplingParams
from support.looped import NullCheckpointManager, RecordingLog
from support.served import Served, _now
from support.switched import new_sync

TOKENS = 48


class Kept(RolloutWorker):
    """Remembers what it made. A random model earns nothing: here half of all answers do, so that the weights move."""

    def collect(self, version: int) -> RolloutBatch:
        rollout = super().collect(version)
        for completion in rollout.completions_B:
            completion.reward = Reward(float(sum(completion.output_ids_T) % 2), False)
        self.__dict__.setdefault("made", []).append((version, rollout.completions_B))
        return rollout


def run_ahead(running: str, max_staleness: int, steps: int) -> dict[str, Any]:
    """A whole run of the loop: rows, and (version it was made for, versions of each token) of every completion."""
    served = _now[0]
    config = config_of(served, running, max_staleness, steps)
    tokenizer = load_tokenizer(served.trainer.folder)
    stream, held_out = load_problems(config, tokenizer)
    log, sync = RecordingLog(), new_sync(served, config.sync)
    recovering_sync = RecoveringWeightSync(sync, served.engine, print)
    with Scorer(config.reward, print) as scorer:
        worker = Kept(config, served.engine, stream, held_out, tokenizer, scorer)
        ahead = AsyncRolloutWorker(worker, max_staleness, steps, lambda: None)
        try:
            colocation = ColocationManager(config.placement, served.trainer.actor, served.engine)
            Loop(config, served.trainer.actor, None, recovering_sync, ahead, log, NullCheckpointManager(), colocation=colocation).run()  # type: ignore[arg-type]
        finally:
            ahead.close()
            sync.close()
    made = [(version, completion.versions_T) for version, completions in worker.__dict__["made"] for completion in completions]
    return {"rows": log.rows, "made": made, "position": ahead.state_dict(), "drawn": stream.state_dict()}


def config_of(served: Served, running: str, max_staleness: int, steps: int) -> Config:
    return served.config.model_copy(
        update=dict(
            Config.model_validate(
                {
                    "model": {"path": served.trainer.folder},
                    "train": {"steps": steps},
                    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": TOKENS},
                    "algorithm": {"correction": "tis"},
                    "placement": {"kind": "disaggregated", "max_staleness": max_staleness},
                    "sync": {"running": running, "transport": "shared_memory"},
                    "data": {"train": "arithmetic", "levels": (2,), "eval_size": 4, "eval_every": 100},
                    "reward": {"function": "arithmetic", "workers": 1},
                }
            )
        )
    )


def start(checkpoint: Path, folder: Path, precision: dict[str, Any]) -> int:
    """As `served.start`, with a cache of which one can see whether it is there."""
    from rollout_sglang.engine import start_engine_and_wait

    served = Served(checkpoint, folder, precision)
    rollout = served.config.rollout.model_copy(update={"max_total_tokens": 1 << 16})
    served.config = served.config.model_copy(update={"rollout": rollout})
    served.engine = start_engine_and_wait(served.config, served.save(folder / "engine_model"), folder)
    _now[:] = [served]
    return served.engine.process.pid


def give_memory_back_and_take_it_again(version: int, prompts: list[list[int]]) -> dict[str, Any]:
    """MiB of the engine after a sync, which leaves its cache written, released, and after the next sync; whether a request waited."""
    served = _now[0]
    sync = new_sync(served, config_of(served, "finish", 0, 1).sync)
    answered = threading.Event()

    def ask() -> None:
        served.engine.generate(prompts, SamplingParams(1.0, 4))
        answered.set()

    try:
        sync.run(version)
        served.engine.release_memory()
        sync.run(version + 1)
        awake = served.engine.get_memory_mb()
        served.engine.release_memory()
        served.engine.release_memory()
        released = served.engine.get_memory_mb()
        asking = threading.Thread(target=ask)
        asking.start()
        waited = not answered.wait(1.0)
        report = sync.run(version + 2)
        asking.join(60)
        return {"awake": awake, "released": released, "again": served.engine.get_memory_mb(), "waited": waited, "proved": report.proved}
    finally:
        sync.close()
