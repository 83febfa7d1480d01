"""The real loop, trainer and checkpoints with a scripted engine, in parts: run in the ranks of a `World`."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.data import ProblemStream
from megatron_rl.distributed import is_rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import Actor, Policy
from megatron_rl.mcore.checkpoint.optimizer import OptimizerState
from megatron_rl.mcore.checkpoint.write import load_run_checkpoint
from megatron_rl.mcore.layers.fp8_linear import find_fp8_layers
from megatron_rl.mcore.load_weights import load_checkpoint
from megatron_rl.mcore.model import build_model, freeze
from megatron_rl.mcore.names import get_model_chunks
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.training.checkpoint_manager import CheckpointManager
from megatron_rl.training.loop import Loop
from megatron_rl.training.resume import choose_checkpoint, describe_layout
from megatron_rl.training.train_state import TrainState
from megatron_rl.types import Completion, Problem, Reward
from parallel.layout import Layout
from support.looped import NullSync, RecordingLog
from support.models import random_sequences
from support.trainer import Trainer, negative_log_likelihood, start

GROUPS, SIZE = 4, 4


class StreamedWorker:
    """Answers to a real stream's problems; the "engine's" log-probs come from the process's own random numbers, of all three kinds."""

    def __init__(self) -> None:
        self.stream = ProblemStream(lambda position: Problem(str(position), "", ""), "numbers")

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def collect(self, version: int) -> RolloutBatch:
        completions = []
        for problem in self.stream.next_batch(GROUPS):
            for member in range(SIZE):
                answer = [11 + member % 2] * (2 + member)
                told = [-5.0 - random.random() - float(np.random.rand()) - float(torch.rand(())) for _ in answer]
                reward = Reward(float(member % 2), bool(member % 2))
                completions.append(Completion(problem, [5, 20 + int(problem.id), 7], answer, told, "stop", version, "", reward))
        return RolloutBatch(completions, {"time/generate": 1.0})

    def evaluate(self, version: int) -> dict[str, float]:
        return {}


def config_of(folder: Path, steps: int, precision: dict[str, Any], every: int = 1) -> Config:
    return Config.model_validate(
        {
            "model": {"path": folder}, "precision": precision, "train": {"steps": steps, "learning_rate": 3e-3, "warmup_steps": 6},
            "algorithm": {"updates_per_step": 2, "calibrate_every": 1, "kl_coef": 0.01, "correction": "tis"},
            "rollout": {"prompts_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 8}, "checkpoint": {"every": every, "keep": 2},
        }
    )  # fmt: skip


def train_to(
    folder: Path,
    run: Path,
    steps: int,
    precision: dict[str, Any],
    go_on: bool = False,
    layout: Layout | None = None,
    broken: str = "",
) -> dict[str, Any]:
    """A run up to `steps`, new or going on from its newest whole checkpoint: the log's rows, all that this rank holds, what was said.

    `broken`: where policy version 2 breaks, in its "sync" or in its second "optimizer step"; a last checkpoint is then tried.
    """
    layout = start(layout)
    config = config_of(folder, steps, precision, every=0 if broken == "sync" else 1)
    trainer = Trainer(folder, precision, config.train.model_dump(mode="json"), layout=layout)
    actor, worker, said = trainer.actor, StreamedWorker(), list[str]()
    mark = TrainState(0, 0, (0.7, 1.3), worker.state_dict(), {})  # bounds that move back to the configured ones, half the way at every step
    seed = 99 if go_on else 0
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    if go_on:
        found = choose_checkpoint(run, steps)
        said += found.describe(describe_layout(layout, trainer.train))
        mark = TrainState.from_dict(found.state)
        load_run_checkpoint(
            found.folder, trainer.model, actor.optimizer, found.state, found.matches_layout(describe_layout(layout, trainer.train))
        )
        actor.steps_done = mark.optimizer_steps
        worker.stream.load_state_dict(mark.data)
    log = RecordingLog()
    checkpoints = CheckpointManager(config, layout, run, actor, trainer.hf_config, said.append, mark.version or -1)
    rank0_only = (worker, log) if is_rank0() else (None, None)
    sync = BrokenSync() if broken == "sync" else NullSync()
    loop = Loop(config, actor, reference(trainer), sync, *rank0_only, checkpoints, None, mark)
    if broken == "optimizer step":
        break_optimizer(actor, 4)
    try:
        loop.run()
    except RunError as error:
        said.append(str(error))
        said += last_checkpoint(loop)
    return {"rows": log.rows, "bytes": trainer.dump_bytes() | moments(actor), "said": said}


class BrokenSync(NullSync):
    def run(self, version: int) -> NullSync:
        if version == 2:
            raise RunError("the engine is gone")
        return self


def break_optimizer(actor: Actor, number: int) -> None:
    """The optimizer's step of that number changes half of what it should."""
    step = actor.optimizer.step

    def half() -> Any:
        if actor.steps_done == number:
            next(actor.chunks[0].parameters()).data.zero_()
            raise RunError("stopped in an optimizer step")
        return step()

    actor.optimizer.step = half


def last_checkpoint(loop: Loop) -> list[str]:
    try:
        loop.save(last=True)
    except RunError as error:
        return [str(error)]
    return []


def reference(trainer: Trainer) -> Policy:
    model = freeze(build_model(trainer.hf_config, trainer.layout, trainer.contract, trainer.train))
    load_checkpoint(model, trainer.folder, trainer.shards)
    return Policy(model, 1.0, 64)


def moments(actor: Actor) -> dict[str, bytes]:
    """Adam's moments and the 16-bit weights' masters, as this rank holds them, raw."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in kept(actor).local_tensors().items()}


def shared_and_whole_state(folder: Path, precision: dict[str, Any], batch: list[TrainingSample]) -> tuple[dict[str, torch.Tensor], ...]:
    """What this replica puts into a checkpoint after one step: of a state that replicas share, of the same once 1 was added to what was
    loaded, of one that each keeps whole."""
    found = []
    for shared in (True, False):
        how = {"distributed_optimizer": shared, "clip_grad": 0.0}  # clipped, the norm would be summed in another order
        actor = Trainer(folder, precision, how, layout=Layout(dp=2)).actor
        actor.update(batch, negative_log_likelihood)
        found.append(whole_state(actor))
        if shared:
            kept(actor).load({name: tensor + 1 for name, tensor in found[0].items()}, step=1)
            found.append(whole_state(actor))
    return tuple(found)


def whole_state(actor: Actor) -> dict[str, torch.Tensor]:
    """A copy of what this rank puts into a checkpoint."""
    return {name: sharded.data.detach().clone() for name, sharded in kept(actor).sharded_for_save().items()}


def kept(actor: Actor) -> OptimizerState:
    return OptimizerState(actor.optimizer, [chunk.sharded_state_dict() for chunk in get_model_chunks(actor.model)])


def load_in(folder: Path, run: Path, precision: dict[str, Any], layout: Layout, how: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a layout holds after loading a run's newest checkpoint: masters, and how the next optimizer step goes."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3, **(how or {})}, layout=layout)
    found = choose_checkpoint(run, 99)
    load_run_checkpoint(
        found.folder, trainer.model, trainer.actor.optimizer, found.state, found.matches_layout(describe_layout(layout, trainer.train))
    )
    masters = trainer.collect_tensors(fp8=False)
    trainer.actor.steps_done = found.state["optimizer_steps"]
    trainer.actor.update(random_sequences(4, seed=5), negative_log_likelihood)
    return {
        "masters": masters,
        "after": trainer.collect_tensors(fp8=False),
        "remarks": found.describe(describe_layout(layout, trainer.train)),
    }


def adopted_after_loading(folder: Path, run: Path, precision: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Saves the trainer of an FP8 checkpoint, after a step or before any, and loads it into a fresh one: layers whose blocks are the
    checkpoint's in both, and names of named_tensors that differ."""
    first, second = (Trainer(folder, precision) for _ in range(2))
    if trained:
        first.actor.update(random_sequences(4, seed=5), negative_log_likelihood)
    config = config_of(folder, 99, precision)
    mark = TrainState(1, first.actor.steps_done, (0.8, 1.2), {})
    CheckpointManager(config, first.layout, run, first.actor, first.hf_config, print, -1).write(mark, last=True)
    found = choose_checkpoint(run, 99)
    load_run_checkpoint(found.folder, second.model, second.actor.optimizer, found.state, True)
    adopted = [[layer.adopted for layer in find_fp8_layers(trainer.model).values()] for trainer in (first, second)]
    before, after = first.collect_named_tensors(), second.collect_named_tensors()
    raw = {name: (before[name].contiguous().view(torch.uint8), after[name].contiguous().view(torch.uint8)) for name in before}
    return {"adopted": adopted, "different": [name for name, (one, two) in raw.items() if not torch.equal(one, two)]}


def save_without_room(folder: Path, run: Path, precision: dict[str, Any], step: int) -> list[str]:
    """Tries to save where no file may be longer than 64 KiB; what is said."""
    trainer, said = Trainer(folder, precision), list[str]()
    config = config_of(folder, 99, precision)
    checkpoints = CheckpointManager(config, trainer.layout, run, trainer.actor, trainer.hf_config, said.append, -1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        checkpoints.write(TrainState(step, step, (0.8, 1.2), {}), last=False)
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return said
