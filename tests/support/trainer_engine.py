"""A trainer with real SGLang engines, in any layout, on the ranks of a `World`. Only rank 0 has the engines."""

from __future__ import annotations

import os
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0, is_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.passes.engine_emulation import emulate_engine
from megatron_rl.mcore.weights.cache_scales import collect_scales, renew_scales
from megatron_rl.mcore.weights.load_weights import load_checkpoint
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.rollout.engine import Abort
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE
from megatron_rl.rollout.engine_pool import EnginePool, start_engines
from megatron_rl.rollout.environments.base import Message
from megatron_rl.rollout.environments.pool import EnvironmentPool
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.sync.checks import check_live_engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.recovery import RecoveringWeightSync
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.training.canary import make_canary
from megatron_rl.training.graph_check import GraphComparison, check_graph, read_training_graph
from megatron_rl.types import Generation, Problem, SamplingParams
from parallel.digest import view_rect
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import Rect
from support.engine_faults import Faults, strike_while, sync_through
from support.models import random_sequences, write_model
from support.planted_differences import plant_difference
from support.trainer import Trainer, own
from support.trainer import compute_logprobs as compute_all_logprobs
from support.trainer import start as start_trainer

MIB = 1 << 20
_SMALL_BUCKET = 64 << 10
TWO_NODES = {"tp": 2, "nodes_per_engine": 2, "hosts": ("127.0.0.2", "127.0.0.1")}
"""An engine whose two ranks lie on two addresses of this machine, the first of them behind a launcher."""
ROLLOUT = {
    "max_running_requests": 16, "max_total_tokens": 1 << 16, "chunked_prefill_size": 40, "request_timeout": 600.0, "start_timeout": 800.0,
}  # fmt: skip
"""The cache takes 64 MiB for each of keys and values of a layer, so that one can see whether it is there; prompts come in chunks."""


class TrainerAndEngines:
    """This rank's part of a trainer, its engines, and syncs between them.

    `sections` of the configuration override `ROLLOUT`. The engines load `engine_model`, or start empty, as in a run, if it is None.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        precision: dict[str, Any],
        sections: dict[str, dict[str, Any]] | None = None,
        layout: Layout | None = None,
        engine_model: Path | None = None,
    ) -> None:
        self.folder, self.messages, self.is_empty = folder, list[str](), engine_model is None
        self.trainer = Trainer(checkpoint, precision, {"learning_rate": 3e-3}, layout=layout)
        sections = {**(sections or {})}
        sections["rollout"] = {**ROLLOUT, **sections.get("rollout", {})}
        if sections["rollout"].get("nodes_per_engine", 1) > 1:
            os.environ.setdefault(LAUNCHER_VARIABLE, "env\n")
        self.config = Config.model_validate({"model": {"path": checkpoint}, "precision": precision, **sections})
        self.start_engines(engine_model)

    @property
    def engines(self) -> EnginePool:
        """The engines, on rank 0."""
        return self.rank0_engines.value

    def start_engines(self, model: Path | None) -> None:
        """Start engines on a checkpoint, or empty engines."""

        def start() -> EnginePool:
            if model is not None:
                return start_engines(self.config, model, self.folder, self.messages.append)
            (empty := self.folder / "engine_model").mkdir(exist_ok=True)
            write_all_but_weights(empty, describe_weights(self.trainer.hf_config, self.trainer.contract), self.trainer.folder)
            return start_engines(self.config, empty, self.folder, self.messages.append, empty=True)

        self.rank0_engines = Rank0(start)

    def plan(self, bucket_bytes: int = MIB) -> SyncPlan:
        geometry, engines = ModelGeometry.from_hf_config(self.trainer.hf_config), self.config.rollout.to_layout()
        return SyncPlan.make(geometry, self.trainer.layout, engines, self.trainer.contract, bucket_bytes)

    @contextmanager
    def weight_sync(self, bucket_bytes: int = MIB, settings: dict[str, Any] | None = None) -> Iterator[WeightSync]:
        """Context manager with a sync in buckets of at most `bucket_bytes`. `settings` replace the configuration's section; a canary
        runs if they ask for one."""
        config = SyncConfig.model_validate(settings) if settings else self.config.sync
        asked = self.config.model_copy(update={"sync": config})
        canary = make_canary(asked, self.trainer.actor, self.trainer.hf_config) if settings and "canary" in settings else None
        sync = WeightSync(self.plan(bucket_bytes), self.rank0_engines, self.trainer.collect_named_tensors, config, canary)
        try:
            yield sync
        finally:
            sync.close()

    @contextmanager
    def recovering_sync(self, bucket_bytes: int = MIB, settings: dict[str, Any] | None = None) -> Iterator[RecoveringWeightSync]:
        """Context manager with a `weight_sync` that replaces lost engines."""
        with self.weight_sync(bucket_bytes, settings) as sync:
            yield RecoveringWeightSync(sync, self.rank0_engines, self.messages.append)

    def sample(self, prompts: list[list[int]], tokens: int, **sampling: Any) -> list[Generation]:
        """Return completions of every prompt, on all ranks."""
        params = SamplingParams(1.0, tokens, **sampling)
        return self.rank0_engines.run(lambda engines: engines.generate(prompts, params))

    def compute_logprobs(self, samples: list[TrainingSample]) -> torch.Tensor:
        """Return the trainer's log-probs of all sampled tokens, concatenated."""
        return torch.cat(compute_all_logprobs(self.trainer.actor, samples)[0])


_current: list[TrainerAndEngines] = []


def current() -> TrainerAndEngines:
    """Return what `start` has created in this process."""
    return _current[0]


def set_launchers(*lines: str) -> None:
    """Set how the next `start` launches engines on their nodes."""
    os.environ[LAUNCHER_VARIABLE] = "\n".join(lines)


def break_transformer_engine(folder: Path) -> None:
    """Let child processes find a Transformer Engine that cannot be imported, as when its libraries do not fit."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text("raise FileNotFoundError('libtransformer_engine.so')")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])


def import_in_child(module: str) -> str:
    """Return the last line that a child process prints when it imports a module."""
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True).stderr.strip().rpartition("\n")[2]


def start(*args: Any) -> None:
    """Start a trainer and its engines with the arguments of `TrainerAndEngines`. Empty engines are filled as policy version 0."""
    _current[:] = [TrainerAndEngines(*args)]
    if current().is_empty:
        sync(0)


def start_architecture(kind: str, folder: Path, precision: dict[str, Any], layout: Layout, rollout: dict[str, Any], empty: bool) -> None:
    """Start a model of an architecture with random weights of seed 0, and engines with these settings that load it, or that are empty."""
    start_trainer(layout)
    model = _write_architecture(kind, folder / "model", precision, layout, seed=0)
    sections = {"rollout": {"max_total_tokens": 4096, **rollout}}
    _current[:] = [TrainerAndEngines(model, folder, precision, sections, layout, None if empty else model)]


def _write_architecture(kind: str, folder: Path, precision: dict[str, Any], layout: Layout, seed: int) -> Path:
    """Write a checkpoint on rank 0, with as many layers as the stages need. Return its folder."""
    if is_rank0():
        layers = max(2, layout.pp * layout.vpp + layout.first_stage_layers)
        write_model(folder, kind, precision, seed, num_hidden_layers=layers)
    dist.barrier()
    return folder


def change_weights(kind: str, seed: int) -> None:
    """Give the trainer of `start_architecture` the weights of another seed, without telling the engine."""
    trainer = current().trainer
    precision = trainer.precision.model_dump()
    model = _write_architecture(kind, current().folder / f"model{seed}", precision, trainer.layout, seed)
    load_checkpoint(trainer.model, model, trainer.shards)
    if trainer.contract.scales_kv_by_layer:
        with renew_scales(trainer.model):
            trainer.actor.compute_logprobs(own(random_sequences(2, seed)))
        assert not any((scales == 1).any() for scales in collect_scales(trainer.model).values()), "a test of scales needs some"


def check_live() -> None:
    """Run the checks of `check_live_engine`."""
    current().rank0_engines.run(lambda engines: check_live_engine(current().plan(), engines))


def prove() -> int:
    """Return the number of engine tensors that the proof alone finds equal."""
    with current().weight_sync() as sync:
        return sync.prove()


def train(batch: list[TrainingSample]) -> None:
    """Take one optimizer step."""
    current().trainer.actor.update(own(batch), PolicyLoss(AlgorithmConfig()))


def sync(version: int, bucket_bytes: int = MIB, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run one whole sync; return its report and the number of chunks."""
    with current().weight_sync(bucket_bytes, settings) as weight_sync:
        return {**asdict(weight_sync.run(version)), "chunks": len(weight_sync.plan.chunks)}


def generate(prompts: list[list[int]], tokens: int = 24, sampling: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sample responses. Return policy versions, (prompt, response) pairs, and the log-probs of all sampled tokens by engine and trainer."""
    generations = current().sample(prompts, tokens, **(sampling or {}))
    samples = make_samples(prompts, generations)
    return {
        "versions": {generation.policy_version for generation in generations},
        "samples": [(sample.prompt_ids.tolist(), sample.response_ids.tolist()) for sample in samples],
        "engine": join_logprobs(generations),
        "trainer": current().compute_logprobs(samples),
        "kept": [sample.kept_tokens for sample in samples],
        "cached": [generation.cached_tokens for generation in generations],
    }


def join_logprobs(generations: list[Generation]) -> torch.Tensor:
    return torch.cat([torch.from_numpy(generation.logprobs_T) for generation in generations])


def make_samples(prompts: list[list[int]], generations: list[Generation]) -> list[TrainingSample]:
    return [
        TrainingSample(prompt, generation.output_ids_T, kept_tokens=generation.kept_tokens)
        for prompt, generation in zip(prompts, generations, strict=True)
    ]


def compute_logprobs(samples: list[TrainingSample]) -> torch.Tensor:
    """Return the trainer's log-probs."""
    return current().compute_logprobs(samples)


def generate_seeded(prompts: list[list[int]], tokens: int, engine: int | None = None) -> list[tuple[list[int], list[float], int]]:
    """Return (tokens, log-probs, policy version) of every prompt, sampled with a seed of its own by all engines, or by one."""
    engines = current().engines
    source = engines if engine is None else engines.replicas[engine].engine
    generations = source.generate(prompts, [SamplingParams(1.0, tokens, seed) for seed in range(len(prompts))])
    return [(generation.output_ids_T.tolist(), generation.logprobs_T.tolist(), generation.policy_version) for generation in generations]


def generate_with(prompts: list[list[int]], samplings: list[SamplingParams]) -> list[Generation]:
    """Return responses to prompts that are each sampled with their own parameters."""
    return current().engines.generate(prompts, samplings)


def abort_generation(prompts: list[list[int]], tokens: int) -> tuple[str, list[tuple[str, int]]]:
    """Abort a generation, later and later until SGLang has read the requests. Return its error, and (finish reason, tokens) of each of
    SGLang's answers."""
    engine, answers = current().engines.replicas[0].engine, list[Any]()
    ask = engine._ask

    def recording(*arguments: Any) -> list[dict[str, Any]]:
        answers[:] = ask(*arguments)
        return answers

    with mock.patch.object(engine, "_ask", recording), ThreadPoolExecutor(1) as pool:
        for attempt in range(20):
            abort = Abort()
            asking = pool.submit(current().engines.generate, prompts, SamplingParams(1.0, tokens), abort)
            time.sleep(0.05 * 1.3**attempt)
            abort.request()
            error = repr(asking.exception())
            ended = [(str(answer["meta_info"]["finish_reason"]["type"]), len(answer["output_ids"])) for answer in answers]
            if any(reason == "abort" and count for reason, count in ended):
                break
    return error, ended


def generate_with_faults(faults: Faults, version: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Run `generate_seeded` with faults; see `support.engine_faults.strike_while`."""
    with current().recovering_sync(_SMALL_BUCKET) as weight_sync:
        return strike_while(lambda: generate_seeded(prompts, tokens), current().engines, weight_sync, version, faults)


def sync_with_faults(faults: Faults, version: int, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a sync with faults; see `support.engine_faults.sync_through`."""
    with current().recovering_sync(_SMALL_BUCKET, settings) as weight_sync:
        return sync_through(current().rank0_engines, weight_sync, version, faults)


def generate_until_it_fails(prompts: list[list[int]]) -> tuple[str, str]:
    """Generate long responses repeatedly. Return the message and the log tail of the RunError that ends it."""
    while True:
        try:
            generate(prompts, tokens=200)
        except RunError as error:
            return str(error), error.log_tail


def take_messages() -> list[str]:
    """Return the messages to the user since the last call."""
    messages, current().messages[:] = list(current().messages), []
    return messages


def change_trainer(name: str, row: int, col: int) -> None:
    """Flip the lowest bit of one element of the trainer, without telling the engine."""
    element = current().trainer.collect_named_tensors()[name][row : row + 1, col : col + 1]
    element.view(torch.uint8)[0, 0] ^= 1


def change_engine(name: str, row: int, col: int) -> None:
    """Sync the trainer's weights with one wrong bit at an element of an engine parameter."""
    plan, tensors = current().plan(), dict(current().trainer.collect_named_tensors())
    transfer = next(transfer for transfer in plan.transfers if transfer.target == name and _contains(transfer.target_rect, row, col))
    wrong = tensors[transfer.source] = tensors[transfer.source].clone()
    place = Rect(transfer.source_rect.row + row - transfer.target_rect.row, transfer.source_rect.col + col - transfer.target_rect.col, 1, 1)
    view_rect(wrong, place).view(torch.uint8).view(-1)[0] ^= 1
    weight_sync = WeightSync(plan, current().rank0_engines, lambda: tensors, SyncConfig())
    try:
        weight_sync.run(0)
    finally:
        weight_sync.close()


def _contains(rect: Rect, row: int, col: int) -> bool:
    return rect.row <= row < rect.row + rect.rows and rect.col <= col < rect.col + rect.cols


def save_run_checkpoint(to: Path) -> Path:
    """Write a run's checkpoint of the current policy."""
    return current().trainer.save(to)


def read_masters() -> dict[str, torch.Tensor]:
    """Return the FP32 masters by Hugging Face name."""
    return current().trainer.collect_tensors(fp8=False)


def restart_engines(model: Path) -> None:
    """Stop the engines and start new ones on another checkpoint."""
    current().rank0_engines.run(lambda engines: engines.stop())
    current().start_engines(model)


def stop_twice() -> None:
    current().engines.stop()
    current().engines.stop()


def generate_and_emulate(prompts: list[list[int]], tokens: int = 24) -> dict[str, torch.Tensor]:
    """Sample responses. Return the log-probs of all sampled tokens by the engine, by the trainer, and by the trainer's model with the
    engine's products."""
    trainer = current().trainer
    assert not find_quantized_layers(trainer.model)  # the trainer computes in high precision
    generations = current().sample(prompts, tokens)
    samples = make_samples(prompts, generations)
    own = current().compute_logprobs(samples)
    named_tensors, format = trainer.collect_named_tensors(), trainer.contract.engine_format
    with emulate_engine(trainer.model, named_tensors, format) as layers:
        emulated = current().compute_logprobs(samples)
    assert layers == sum(format.scale_name(name) in named_tensors for name in named_tensors) > 0
    engine = join_logprobs(generations)
    return {"engine": engine, "trainer": own, "emulated": emulated}


class TurnCounter:
    """An environment that replies with the number of the turn. A random model soon writes one of so many stop letters."""

    stop = tuple(string.ascii_lowercase)

    def __init__(self, problem: Problem) -> None:
        self.turns = 0

    def step(self, text: str) -> Message | None:
        self.turns += 1
        return Message(f"={self.turns}=") if text.endswith(self.stop) else None


def converse(prompts: list[str], version: int, tokens: int, turns: int) -> dict[str, Any]:
    """Sample responses of several turns.

    Returns their texts, and concatenated log-probs of the sampled tokens by the engine (`engine`), by the trainer with the environment's
    tokens masked (`trainer`), and selected from the trainer's log-probs of whole responses (`whole`).
    """
    trainer = current().trainer
    config = EnvironmentConfig(name="support.trainer_engine:TurnCounter", max_turns=turns, workers=1)
    with EnvironmentPool(config) as environments:
        sampler = MultiTurnSampler(current().engines, load_tokenizer(trainer.folder), environments)
        answers = sampler.sample([Problem(text, text, "") for text in prompts], [SamplingParams(1.0, tokens)] * len(prompts), version)
    whole = trainer.actor.compute_logprobs([TrainingSample(answer.prompt_ids_T, answer.output_ids_T) for answer in answers])[0]
    masked = [TrainingSample(answer.prompt_ids_T, answer.output_ids_T, response_mask=answer.response_mask_T) for answer in answers]
    masks = [torch.tensor(answer.response_mask_T) for answer in answers]
    engine = [torch.tensor(answer.logprobs_T) for answer in answers]
    return {
        "parts": [answer.dialogue for answer in answers],
        "finish": [answer.finish_reason for answer in answers],
        "sampled": [answer.sampled_count for answer in answers],
        "engine": torch.cat([values[mask] for values, mask in zip(engine, masks, strict=True)]),
        "trainer": current().compute_logprobs(masked),
        "whole": torch.cat([values[mask] for values, mask in zip(whole, masks, strict=True)]),
    }


def compare_graphs(plant: str = "") -> tuple[list[str], PrecisionGraph, PrecisionGraph]:
    """Return the lines of differences, the trainer's graph, and the graph of engine rank 0."""
    trainer = current().trainer
    with plant_difference(trainer.model, plant):
        comparison = GraphComparison(read_training_graph(trainer.model).value, tuple(current().engines.read_graph()))
    return comparison.differences, comparison.training, comparison.rollout[0]


def check_graphs(folder: Path, plant: str = "") -> None:
    """Compare the live graphs as at the start of a run."""
    trainer = current().trainer
    with plant_difference(trainer.model, plant):
        check_graph(trainer.model, current().rank0_engines, trainer.contract, folder)


def read_trainer_graph(folder: Path, precision: dict[str, Any], plant: str = "", only_on: int | None = None) -> PrecisionGraph:
    """Return the training graph of a checkpoint. A difference is planted on every rank, or only on rank `only_on`."""
    model = Trainer(folder, precision).model
    with plant_difference(model, plant if only_on in (None, dist.get_rank()) else ""):
        return read_training_graph(model).run(lambda graph: graph)
