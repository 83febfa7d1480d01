"""A trainer with a real SGLang engine below it, run as the one rank of a `World`."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.data.byte_tokenizer import load_tokenizer
from megatron_rl.errors import RunError
from megatron_rl.mcore.checkpoint.write import CheckpointWriter
from megatron_rl.mcore.engine_emulation import emulate_engine
from megatron_rl.mcore.export import export_checkpoint, save_hf
from megatron_rl.mcore.layers.fp8_linear import find_fp8_layers
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.rollout.environment_pool import EnvironmentPool
from megatron_rl.rollout.environments.base import Message
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.sync.engine_check import check_live_engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.training.graph_check import GraphComparison, check_graph, read_training_graph
from megatron_rl.types import Problem, SamplingParams
from parallel.digest import view_rect
from parallel.model_geometry import ModelGeometry
from parallel.shards import Rect
from rollout_sglang.engine import SGLangEngine, start_engine_and_wait
from support.engine_faults import engine_config
from support.trainer import Trainer


class Served:
    """A trainer, its engine, and syncs between them."""

    def __init__(self, checkpoint: Path, folder: Path, precision: dict[str, Any]) -> None:
        self.folder = folder
        self.trainer = Trainer(checkpoint, precision, {"learning_rate": 3e-3})
        self.config = engine_config(checkpoint, precision)
        self.engine: SGLangEngine

    def save(self, to: Path) -> Path:
        """What a run hands to its engine."""
        trainer = self.trainer
        save_hf(to, trainer.collect_named_tensors(), trainer.hf_config, trainer.layout, trainer.contract, trainer.folder)
        return to

    def plan(self, bucket_bytes: int) -> SyncPlan:
        geometry = ModelGeometry.from_hf_config(self.trainer.hf_config)
        return SyncPlan.make(geometry, self.trainer.layout, (1, 1), self.trainer.contract, bucket_bytes)

    def sync(self, bucket_bytes: int) -> WeightSync:
        return WeightSync(self.plan(bucket_bytes), self.engine, self.trainer.collect_named_tensors)


_now: list[Served] = []


def start(checkpoint: Path, folder: Path, precision: dict[str, Any], engine_model: Path | None = None) -> int:
    """Brings up trainer and engine, which loads `engine_model` where given, else the trainer's own blocks. Returns the server's pid."""
    served = Served(checkpoint, folder, precision)
    served.engine = start_engine_and_wait(served.config, engine_model or served.save(folder / "engine_model"), folder)
    _now[:] = [served]
    return served.engine.process.pid


def save_only(checkpoint: Path, to: Path, precision: dict[str, Any]) -> Path:
    """The folder that a run with this checkpoint hands to its engine."""
    return Served(checkpoint, to, precision).save(to)


def check_live() -> None:
    """The checks of `check_live_engine`."""
    check_live_engine(_now[0].plan(1 << 20), _now[0].engine)


def prove() -> int:
    """The proof alone: number of engine tensors proved."""
    sync = _now[0].sync(1 << 20)
    try:
        return sync.prove()
    finally:
        sync.close()


def train(batch: list[TrainingSample]) -> None:
    """One optimizer step."""
    _now[0].trainer.actor.update(batch, PolicyLoss(AlgorithmConfig()))


def sync(version: int, bucket_bytes: int) -> dict[str, Any]:
    """One whole sync in buckets of at most that many bytes: its report and the number of chunks."""
    weight_sync = _now[0].sync(bucket_bytes)
    try:
        return {**dataclasses.asdict(weight_sync.run(version)), "chunks": len(weight_sync.plan.chunks)}
    finally:
        weight_sync.close()


def generate(prompts: list[list[int]], tokens: int = 24) -> dict[str, Any]:
    """Samples answers: policy versions, engine's and trainer's log-probs of all sampled tokens, one after the other."""
    served = _now[0]
    answers = served.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=tokens))
    sequences = [TrainingSample(prompt, answer.output_ids_T) for prompt, answer in zip(prompts, answers, strict=True)]
    return {
        "versions": {answer.policy_version for answer in answers},
        "engine": torch.tensor([value for answer in answers for value in answer.logprobs_T]),
        "trainer": torch.cat(served.trainer.actor.compute_logprobs(sequences)[0]),
    }


def change_trainer(name: str, row: int, col: int) -> None:
    """Flips the lowest bit of one element that the trainer holds, without the engine being told."""
    element = _now[0].trainer.collect_named_tensors()[name][row : row + 1, col : col + 1]
    element.view(torch.uint8)[0, 0] ^= 1


def change_engine(name: str, row: int, col: int) -> None:
    """Syncs the trainer's blocks with one bit of what fills that element of an engine parameter wrong."""
    served = _now[0]
    plan, named_tensors = served.plan(1 << 20), dict(served.trainer.collect_named_tensors())
    transfer = next(transfer for transfer in plan.transfers if transfer.target == name and _holds(transfer.target_rect, row, col))
    wrong = named_tensors[transfer.source] = named_tensors[transfer.source].clone()
    place = Rect(transfer.source_rect.row + row - transfer.target_rect.row, transfer.source_rect.col + col - transfer.target_rect.col, 1, 1)
    view_rect(wrong, place).view(torch.uint8).view(-1)[0] ^= 1
    sync = WeightSync(plan, served.engine, lambda: named_tensors)
    try:
        sync.run(0)
    finally:
        sync.close()


def _holds(rect: Rect, row: int, col: int) -> bool:
    return rect.row <= row < rect.row + rect.rows and rect.col <= col < rect.col + rect.cols


def save_run_checkpoint(to: Path) -> Path:
    """A run's checkpoint of the policy as it is."""
    trainer = _now[0].trainer
    state = {"step": 1, "policy_version": 1, "precision": trainer.precision.model_dump(mode="json")}
    CheckpointWriter(to, trainer.model, trainer.hf_config, trainer.folder, state).finish()
    return to


def masters() -> dict[str, torch.Tensor]:
    """FP32 masters under Hugging Face names."""
    return _now[0].trainer.collect_tensors(fp8=False)


def export(checkpoint: Path, to: Path, precision: str) -> Path:
    """The command `export`, in a process that is in no world yet."""
    from megatron_rl.mcore.model import stop_megatron

    stop_megatron()
    export_checkpoint(checkpoint, to, precision)
    stop_megatron()
    return to


def restart_engine(engine_model: Path, folder: Path) -> int:
    """Ends the engine and starts a fresh one on another checkpoint."""
    served = _now[0]
    served.engine.stop()
    served.engine = start_engine_and_wait(served.config, engine_model, folder)
    return served.engine.process.pid


def generate_until_it_fails(prompts: list[list[int]]) -> tuple[str, str]:
    """Generates long answers again and again: (the line, the log tail) of the RunError that ends it."""
    while True:
        try:
            generate(prompts, tokens=200)
        except RunError as error:
            return str(error), error.log_tail


def stop_twice() -> None:
    _now[0].engine.stop()
    _now[0].engine.stop()


def generate_and_emulate(prompts: list[list[int]], tokens: int = 24) -> dict[str, torch.Tensor]:
    """Samples answers from the served engine; log-probs of all sampled tokens by the engine, the trainer, and the trainer's model with
    the products of the engine."""
    here = _now[0]
    assert not find_fp8_layers(here.trainer.model)  # the trainer computes in high precision
    answers = here.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=tokens))
    sequences = [TrainingSample(prompt, answer.output_ids_T) for prompt, answer in zip(prompts, answers, strict=True)]
    trainer = torch.cat(here.trainer.actor.compute_logprobs(sequences)[0])
    with emulate_engine(here.trainer.model, here.trainer.collect_named_tensors(), here.trainer.contract.activation_format) as layers:
        emulated = torch.cat(here.trainer.actor.compute_logprobs(sequences)[0])
    mlps = here.trainer.hf_config.get("num_experts") or 1  # of a layer
    assert layers == (2 + 2 * mlps) * here.trainer.hf_config["num_hidden_layers"]
    return {
        "engine": torch.tensor([value for answer in answers for value in answer.logprobs_T]),
        "trainer": trainer,
        "emulated": emulated,
    }


class Counter:
    """Counts the turns aloud. A random model soon writes one of so many letters."""

    stop = tuple(string.ascii_lowercase)

    def __init__(self, problem: Problem) -> None:
        self.turns = 0

    def step(self, text: str) -> Message | None:
        self.turns += 1
        return Message(f"={self.turns}=") if text.endswith(self.stop) else None


def converse(prompts: list[str], version: int, tokens: int, turns: int) -> dict[str, Any]:
    """Samples answers: their texts, and log-probs of what the policy sampled, one answer after the other, by the engine (`engine`), by
    the trainer given answers with the environment's tokens marked (`trainer`), and out of those of whole answers (`whole`)."""
    here = _now[0]
    config = EnvironmentConfig(name="support.trainer_engine:Counter", max_turns=turns, workers=1)
    with EnvironmentPool(config) as environments:
        talk = MultiTurnSampler(here.engine, load_tokenizer(here.trainer.folder), environments)
        answers = talk.sample([Problem(text, text, "") for text in prompts], SamplingParams(1.0, tokens), version)
    whole = here.trainer.actor.compute_logprobs([TrainingSample(answer.prompt_ids_T, answer.output_ids_T) for answer in answers])[0]
    marked = [TrainingSample(answer.prompt_ids_T, answer.output_ids_T, response_mask=answer.response_mask_T) for answer in answers]
    masks = [torch.tensor(answer.response_mask_T) for answer in answers]
    told = [torch.tensor(answer.logprobs_T) for answer in answers]
    return {
        "parts": [answer.dialogue for answer in answers],
        "ids": [answer.output_ids_T for answer in answers],
        "finish": [answer.finish_reason for answer in answers],
        "sampled": [answer.sampled_count for answer in answers],
        "engine": torch.cat([values[mask] for values, mask in zip(told, masks, strict=True)]),
        "trainer": torch.cat(here.trainer.actor.compute_logprobs(marked)[0]),
        "whole": torch.cat([values[mask] for values, mask in zip(whole, masks, strict=True)]),
    }


def read_trainer_graph(folder: Path, precision: dict[str, Any], plant: str = "", only_on: int | None = None) -> PrecisionGraph | None:
    """The training graph of a checkpoint, on rank 0; the difference is planted on every rank, or on one."""
    model = Trainer(folder, precision).model
    with plant_difference(model, plant if only_on in (None, torch.distributed.get_rank()) else ""):
        return read_training_graph(model)


def compare_served_graphs(plant: str = "") -> tuple[list[str], PrecisionGraph, PrecisionGraph]:
    """Of the served trainer and its engine: the lines of differences, training graph, rollout graph of rank 0."""
    trainer, engine = _now[0].trainer, _now[0].engine
    with plant_difference(trainer.model, plant):
        comparison = GraphComparison(read_training_graph(trainer.model), tuple(engine.read_graph()))
    return comparison.differences, comparison.training, comparison.rollout[0]


def check_served(folder: Path, plant: str = "") -> None:
    """What a run does at its start."""
    trainer = _now[0].trainer
    with plant_difference(trainer.model, plant):
        check_graph(trainer.model, _now[0].engine, trainer.contract, folder)


@contextmanager
def plant_difference(model: Any, plant: str) -> Iterator[None]:
    """Changes one thing of a live model for a while; "" changes nothing."""
    undo = _PLANTS[plant](model) if plant else lambda: None
    try:
        yield
    finally:
        undo()


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old)


def _smaller_blocks(model: Any) -> Callable[[], None]:
    """fc2 of the last layer in blocks of 64x64."""
    layer = model.decoder.layers[-1].mlp.linear_fc2
    scale = layer.blocks.scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    return _set(layer, "blocks", layer.blocks._replace(scale=scale))


def _weight_scales(model: Any) -> Callable[[], None]:
    layer = model.decoder.layers[-1].mlp.linear_fc1
    return _set(layer, "blocks", layer.blocks._replace(scale=layer.blocks.scale * 1.1))


def _activation_scales(model: Any) -> Callable[[], None]:
    with ExitStack() as undone:
        for layer in find_fp8_layers(model).values():
            undone.callback(_set(layer, "scale_format", "fp32"))
        return undone.pop_all().close


def _high_precision_layer(model: Any) -> Callable[[], None]:
    """The output projection of the last layer loses its blocks: the engine then quantises a layer more than the trainer."""
    return _set(model.decoder.layers[-1].self_attention.linear_proj, "blocks", None)


def _fp8_head(model: Any) -> Callable[[], None]:
    """The trainer quantises a layer more than the engine."""
    head, example = model.output_layer, model.decoder.layers[-1].mlp.linear_fc2
    rows, cols = head.weight.shape
    head.blocks = example.blocks._replace(
        data=head.weight.detach().to(torch.float8_e4m3fn), scale=example.blocks.scale.new_ones(rows // 128, cols // 128)
    )
    head.scale_format = example.scale_format

    def undo() -> None:
        del head.blocks, head.scale_format

    return undo


def _norm_dtype(model: Any) -> Callable[[], None]:
    norm = model.decoder.layers[-1].input_layernorm
    return _set(norm.weight, "data", norm.weight.data.to(torch.float16))


def _unknown_parameter(model: Any) -> Callable[[], None]:
    mlp = model.decoder.layers[-1].mlp
    mlp.register_parameter("extra", torch.nn.Parameter(torch.zeros(4)))
    return lambda: delattr(mlp, "extra")


_PLANTS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "granularity": _smaller_blocks,
    "weight scales": _weight_scales,
    "activation scales": _activation_scales,
    "high-precision layer": _high_precision_layer,
    "fp8 head": _fp8_head,
    "dtype": _norm_dtype,
    "unknown parameter": _unknown_parameter,
}
