"""Generation ahead of the trainer, and weight switches under load; see `support.trainer_engine`."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.data import load_problems
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rollout.async_worker import AsyncRolloutWorker
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.worker import RolloutBatch, RolloutWorker, StepDraw
from megatron_rl.types import Generation, Reward, SamplingParams
from parallel.transport.pack import ChunkPacker
from support.processes import until
from support.trainer_engine import MIB, current, join_logprobs, make_samples, train
from support.training_runs import NullCheckpointManager, RecordingLog, loop_of

TOKENS = 48
TASK = "examples.arithmetic.task:Arithmetic"


class RecordingWorker(RolloutWorker):
    """A rollout worker that keeps all completions in `batches`. Half of the responses are rewarded, so that the weights of a random
    model move."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: list[tuple[int, list[Any]]] = []

    def collect(self, draw: StepDraw) -> RolloutBatch:
        rollout = super().collect(draw)
        for completion in rollout.completions_B:
            completion.reward = Reward(float(completion.output_ids_T.sum() % 2), False)
        self.batches.append((draw.version, rollout.completions_B))
        return rollout


def run_ahead(running: str, max_staleness: int, steps: int) -> dict[str, Any]:
    """Run the whole loop. Return its rows, and for every completion the version it was collected for and the version of each token."""
    served = current()
    config = Config.model_validate(
        {
            "model": {"path": served.trainer.folder},
            "train": {"steps": steps},
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": TOKENS},
            "algorithm": {"correction": "tis"},
            "placement": {"kind": "disaggregated", "max_staleness": max_staleness},
            "sync": {"running": running, "transport": "shared_memory"},
            "data": {"train": TASK, "eval": TASK, "settings": {"levels": (2,)}, "eval_size": 4, "eval_every": 100},
            "reward": {"function": "examples.arithmetic.reward:reward", "workers": 1},
        }
    )
    tokenizer = load_tokenizer(served.trainer.folder)
    stream, held_out = load_problems(config, tokenizer)
    log = RecordingLog()
    settings = config.sync.model_dump()
    with Scorer(config.reward, print) as scorer, served.recovering_sync(config.sync.chunk_bytes, settings) as sync:
        worker = RecordingWorker(config, MultiTurnSampler(served.engines, tokenizer), stream, held_out, scorer)
        ahead = AsyncRolloutWorker(worker, max_staleness, steps, lambda: None)
        try:
            loop_of(config, served.trainer, None, sync, ahead, log, NullCheckpointManager(), engines=served.engines).run()
        finally:
            ahead.close()
    token_versions = [
        (version, (version - completion.version_lags_T.astype(int)).tolist())
        for version, completions in worker.batches
        for completion in completions
    ]
    return {"rows": log.rows, "token_versions": token_versions, "position": ahead.snapshot()(), "drawn": stream.state_dict()}


def release_memory_and_take_it_back(version: int, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the engine's MiB after a sync, after a release of its memory, and after the next sync; whether a request waited; and the
    proved tensors."""
    served, answered = current(), threading.Event()

    def ask() -> None:
        served.engines.generate(prompts, SamplingParams(1.0, 4))
        answered.set()

    with served.weight_sync() as sync:
        sync.run(version)
        served.engines.release_memory()
        sync.run(version + 1)
        awake = served.engines.get_memory_mb()
        served.engines.release_memory()
        served.engines.release_memory()
        released = served.engines.get_memory_mb()
        asking = threading.Thread(target=ask)
        asking.start()
        waited = not answered.wait(1.0)
        report = sync.run(version + 2)
        asking.join()
        return {"awake": awake, "released": released, "again": served.engines.get_memory_mb(), "waited": waited, "proved": report.proved}


_THREADS = 4
Answers = list[tuple[list[int], Generation]]


def switch_under_load(
    settings: dict[str, Any], first: int, switches: int, batch: list[TrainingSample], prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """Keep four threads sampling while the policy is trained and synced as versions first, first + 1, ...

    Returns the reports of the syncs, the number of running requests when each sync began, the number of completions with tokens of several
    versions (`mixed`), and for each version the log-probs of its tokens by the engine and by the trainer of that version.
    """
    served, stop, answers = current(), threading.Event(), Answers()
    weights, reports, running = {}, [], []

    def ask(thread: int) -> None:
        mine = prompts[thread::_THREADS]
        while not stop.is_set():
            answers.extend(zip(mine, served.engines.generate(mine, SamplingParams(temperature=1.0, max_new_tokens=tokens)), strict=True))

    def wait_for_answers(asking: list[Future[None]]) -> None:
        goal = len(answers) + len(prompts)
        until(lambda: len(answers) >= goal or any(task.done() for task in asking), 300, "answers")

    with served.weight_sync(MIB, settings) as sync, ThreadPoolExecutor(_THREADS) as pool:
        sync.run(first)
        asking = [pool.submit(ask, thread) for thread in range(_THREADS)]
        try:
            for version in range(first, first + switches + 1):
                if version > first:
                    running.append(sum(replica.outstanding for replica in served.engines.replicas))
                    reports.append(asdict(sync.run(version)))
                weights[version] = copy_weights(served.trainer.model)
                wait_for_answers(asking)
                train(batch)
        finally:
            stop.set()
        for task in asking:
            task.result()
    mixed = sum(generation.versions_T is not None for _, generation in answers)
    return {"reports": reports, "running": running, "mixed": mixed, "logprobs": compare_logprobs(weights, answers)}


def copy_weights(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return copies of the parameters, and of the scales of quantized ones."""
    scales = {name: layer.scale.clone() for name, layer in find_quantized_layers(model).items()}
    return {name: value.detach().clone() for name, value in model.named_parameters()}, scales


def compare_logprobs(weights: dict[int, Any], answers: Answers) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return for each version the log-probs of its tokens by the engine, and by the trainer with that version's weights."""
    logprobs, model = {}, current().trainer.model
    versions = [
        [generation.policy_version] * len(generation.output_ids_T) if generation.versions_T is None else generation.versions_T.tolist()
        for _, generation in answers
    ]
    for version in sorted(set().union(*versions)):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[version][0][name])
        for name, layer in find_quantized_layers(model).items():
            layer.set_scale(weights[version][1][name])
        sampled = [(*answer, each) for answer, each in zip(answers, versions, strict=True) if version in each]
        prompts, generations, token_versions = zip(*sampled, strict=True)
        own = torch.tensor([number for each in token_versions for number in each]) == version
        engine = join_logprobs(generations)
        logprobs[version] = engine[own], current().compute_logprobs(make_samples(prompts, generations))[own]
    return logprobs


def sync_with_wrong_byte(settings: dict[str, Any], version: int) -> None:
    """Run a sync whose chunks are changed after they were hashed. Propagates the error."""
    pack = ChunkPacker.pack

    def pack_wrong(packer: ChunkPacker, named_rects: Any, flat: Any, hashing: bool) -> str:
        digest = pack(packer, named_rects, flat, hashing)
        flat[len(flat) // 2] ^= 1
        return digest

    with mock.patch.object(ChunkPacker, "pack", pack_wrong), current().weight_sync(MIB, settings) as sync:
        sync.run(version)


def sync_that_breaks(settings: dict[str, Any], version: int) -> None:
    """Run a sync whose trainer fails in the middle. Propagates the error."""
    with mock.patch.object(ChunkPacker, "pack", side_effect=OSError("out of memory, say")), current().weight_sync(MIB, settings) as sync:
        sync.run(version)
