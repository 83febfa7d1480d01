"""Policies that change while requests run: on top of `support.served`, in the same one rank of a `World`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.mcore.layers.fp8_linear import quantize_model
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import Generation, SamplingParams
from support.served import Served, _now

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
