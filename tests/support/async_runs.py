"""Generation ahead of the trainer, and weight switches under load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.data import load_problems
from megatron_rl.data.byte_tokenizer import load_tokenizer
from megatron_rl.mcore.layers.fp8_linear import quantize_model
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.async_worker import AsyncRolloutWorker
from megatron_rl.rollout.worker import RolloutBatch, RolloutWorker
from megatron_rl.sync.recovery import RecoveringWeightSync
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.training.colocation import ColocationManager
from megatron_rl.training.loop import Loop
from megatron_rl.types import Generation, Reward, SamplingParams
from support.trainer_engine import Served, _now
from support.training_runs import NullCheckpointManager, RecordingLog

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


_THREADS = 4
Answers = list[tuple[list[int], Generation]]


def switch_under_load(
    settings: dict[str, Any], first: int, switches: int, batch: list[TrainingSample], prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """Four threads ask all the time, while the policy is trained and synced as versions first, first + 1, ...

    Returns the syncs' reports, how many requests were running when each sync began, how many completions hold tokens of several
    versions, and for each version the engine's log-probs and those of the trainer that held it, of all tokens sampled by it.
    """
    served, stop, answers = _now[0], threading.Event(), Answers()
    sync = new_sync(served, SyncConfig.model_validate(settings))
    masters, reports, running = {}, [], []

    def ask(which: int) -> None:
        while not stop.is_set():
            found = served.engine.generate(prompts[which::_THREADS], SamplingParams(temperature=1.0, max_new_tokens=tokens))
            answers.extend(zip(prompts[which::_THREADS], found, strict=True))

    try:
        sync.run(first)
        with ThreadPoolExecutor(_THREADS) as pool:
            asking = [pool.submit(ask, which) for which in range(_THREADS)]
            try:
                for version in range(first, first + switches + 1):
                    if version > first:
                        running.append(served.engine._gate._inside)
                        reports.append(asdict(sync.run(version)))
                    masters[version] = {name: value.detach().clone() for name, value in served.trainer.model.named_parameters()}
                    wait_for_answers(answers, len(prompts), asking)
                    served.trainer.actor.update(batch, PolicyLoss(AlgorithmConfig()))
            finally:
                stop.set()
            for task in asking:
                task.result(60)
    finally:
        sync.close()
    mixed = sum(len(set(generation.versions_T)) > 1 for _, generation in answers)
    return {"reports": reports, "running": running, "mixed": mixed, "logprobs": compare_logprobs(served, masters, answers)}


def new_sync(served: Served, settings: SyncConfig) -> WeightSync:
    return WeightSync(served.plan(settings.chunk_bytes), served.engine, served.trainer.collect_named_tensors, settings)


def wait_for_answers(answers: Answers, more: int, asking: list[Any]) -> None:
    """Until so many more answers came, or a thread failed."""
    goal = len(answers) + more
    while len(answers) < goal and not any(task.done() for task in asking):
        threading.Event().wait(0.02)


def compare_logprobs(
    served: Served, masters: dict[int, dict[str, torch.Tensor]], answers: Answers
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """version -> (engine's, trainer's) log-probs of its tokens, with the trainer put back to that version."""
    found = {}
    versions = [generation.versions_T or [generation.policy_version] * len(generation.output_ids_T) for _, generation in answers]
    for version in sorted({one for each in versions for one in each}):
        mine = [answer for answer, each in zip(answers, versions, strict=True) if version in each]
        own = torch.tensor([one for each in versions if version in each for one in each]) == version
        with torch.no_grad():
            for name, parameter in served.trainer.model.named_parameters():
                parameter.copy_(masters[version][name])
        quantize_model(served.trainer.model)
        sequences = [TrainingSample(prompt, generation.output_ids_T) for prompt, generation in mine]
        engine = torch.tensor([value for _, generation in mine for value in generation.logprobs_T])
        found[version] = engine[own], torch.cat(served.trainer.actor.compute_logprobs(sequences)[0])[own]
    return found


def sync_with_wrong_byte(settings: dict[str, Any], version: int) -> None:
    """A sync whose chunks are changed on their way, after they were hashed. Raises what it raises."""
    from parallel.transport.pack import ChunkPacker

    pack = ChunkPacker.pack

    def wrong(self: ChunkPacker, named_rects: Any, flat: Any, hashing: bool) -> str:
        digest = pack(self, named_rects, flat, hashing)
        flat[len(flat) // 2] ^= 1
        return digest

    sync = new_sync(_now[0], SyncConfig.model_validate(settings))
    ChunkPacker.pack = wrong
    try:
        sync.run(version)
    finally:
        ChunkPacker.pack = pack
        sync.close()


def sync_that_breaks(settings: dict[str, Any], version: int) -> None:
    """A sync whose trainer fails in the middle. Raises what it raises."""
    from parallel.transport.pack import ChunkPacker

    sync, pack = new_sync(_now[0], SyncConfig.model_validate(settings)), ChunkPacker.pack

    def broken(self: ChunkPacker, named_rects: Any, flat: Any, hashing: bool) -> str:
        raise OSError("out of memory, say")

    ChunkPacker.pack = broken
    try:
        sync.run(version)
    finally:
        ChunkPacker.pack = pack
        sync.close()
