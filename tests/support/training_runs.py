"""The training loop with a scripted rollout: learning, resuming, hanging, planted mismatches."""

from __future__ import annotations

import json
import random
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from examples.arithmetic import warm_start
from examples.arithmetic.config import DemoConfig
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.replay import read_groups
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config, TrainConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.data import ProblemOrder, ProblemStream
from megatron_rl.distributed import Rank0, run_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Actor, Critic, Policy
from megatron_rl.mcore.checkpoint.checkpointing import CheckpointWriter, load_run_checkpoint
from megatron_rl.mcore.checkpoint.optimizer import MasterState, OptimizerState
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.model import build_model, freeze, start_megatron
from megatron_rl.mcore.passes.engine_emulation import emulate_cache, emulate_engine
from megatron_rl.mcore.weights.cache_scales import collect_scales
from megatron_rl.mcore.weights.load_weights import build_rank_shards, global_parameters, load_checkpoint
from megatron_rl.metrics import UndeclaredMetricWarning, warn_undeclared
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.profiling import StepProfiler
from megatron_rl.observability.rank_log import rank_log
from megatron_rl.observability.signals import install_signal_handlers, prefer_stop_error
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.worker import RolloutBatch
from megatron_rl.training.checkpoint_manager import CheckpointManager
from megatron_rl.training.critic_trainer import CriticTrainer
from megatron_rl.training.loop import Loop
from megatron_rl.training.mismatch_attribution import MismatchAttribution
from megatron_rl.training.policies import load_critic, load_teacher
from megatron_rl.training.policy_trainer import PolicyTrainer
from megatron_rl.training.recorder import Recorder
from megatron_rl.training.resume import choose_checkpoint, describe_layout
from megatron_rl.training.train_state import TrainState
from megatron_rl.types import Completion, Problem, Reward
from parallel.layout import Layout
from support.models import random_sequences
from support.trainer import Trainer, negative_log_likelihood, own, start

T = TypeVar("T")

GROUPS, SIZE = 4, 4
GOOD, BAD = 11, 12
"""The token that every rewarded answer is made of, and that of the others."""
ENVIRONMENT_TOKENS = [13, 14]
"""What an environment writes."""


class ScriptedWorker:
    """Always the same groups, half of each rewarded; engine log-probs are the trainer's and a little noise.

    `environment_logprob`: an environment speaks after the first token of each answer, and this is stored as the log-prob of what it says.
    """

    def __init__(self, actor: Actor, noise: float, environment_logprob: float | None) -> None:
        self.actor, self._noise, self._environment_logprob, self._source = actor, noise, environment_logprob, random.Random(0)
        self.leads: list[float] = []

    def sequences(self) -> list[TrainingSample]:
        samples = [
            TrainingSample([5, 6 + group, 7], [GOOD if member % 2 else BAD] * (2 + member))
            for group in range(GROUPS)
            for member in range(SIZE)
        ]
        for sequence in samples if self._environment_logprob is not None else []:
            mask = [True, *[False] * len(ENVIRONMENT_TOKENS), *[True] * (len(sequence.response_ids) - 1)]
            first, *rest = sequence.response_ids.split([1, len(sequence.response_ids) - 1])
            sequence.response_ids, sequence.response_mask = torch.cat([first, torch.tensor(ENVIRONMENT_TOKENS), *rest]), torch.tensor(mask)
        return samples

    def begin(self, version: int) -> None: ...

    def collect(self, version: int) -> RolloutBatch:
        completions = []
        for number, (sequence, logprobs) in enumerate(zip(self.sequences(), self.actor.compute_logprobs(self.sequences())[0], strict=True)):
            engine_logprobs = [value + self._source.gauss(0, self._noise) for value in logprobs.tolist()]
            reward = Reward(float(number % 2), bool(number % 2))
            ids = sequence.prompt_ids.numpy(), sequence.response_ids.numpy()
            mask = sequence.response_mask.numpy() if len(sequence.response_mask) else None
            if self._environment_logprob is not None:
                engine_logprobs[1:1] = [self._environment_logprob] * len(ENVIRONMENT_TOKENS)
            completions.append(
                Completion(
                    Problem(str(number), "", ""),
                    *ids,
                    np.array(engine_logprobs, np.float32),
                    "stop",
                    version,
                    "",
                    reward,
                    response_mask_T=mask,
                )
            )
        return RolloutBatch(completions, {"ahead/generate": 1.0})

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return dict

    def evaluate(self, version: int) -> RolloutBatch:
        """Note how much likelier a good token is than a bad one, in nats; no held-out problems."""
        logprobs = self.actor.compute_logprobs(self.sequences())[0]
        good, bad = (torch.cat([part for number, part in enumerate(logprobs) if number % 2 == which]).mean() for which in (1, 0))
        self.leads.append(float(good - bad))
        return RolloutBatch([])


class NullSync:
    def run(self, version: int, meanwhile: Callable[[], None]) -> NullSync:
        meanwhile()
        return self

    def run_with_recovery(self, version: int, work: Callable[[], T]) -> T:
        return run_on_rank0(work)

    def metrics(self) -> dict[str, float]:
        return {}


class NullCheckpointManager:
    def write(self, mark: TrainState, last: bool) -> None: ...

    def poll(self) -> None: ...

    def wait(self) -> None: ...


class NullEngine:
    def get_memory_mb(self) -> float:
        return 0.0

    def release_memory(self) -> None: ...


class RecordingLog:
    """What a RunLog is told."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.samples_seen: list[dict[str, Any]] = []

    def set_phase(self, phase: str) -> None: ...

    def write_step(self, metrics: dict[str, float]) -> None:
        with warnings.catch_warnings(action="error", category=UndeclaredMetricWarning):
            warn_undeclared(metrics)
        self.rows.append(metrics)

    def write_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.samples_seen += rows


def loop_of(
    config: Config,
    trainer: Trainer,
    reference: Policy | None,
    sync: Any,
    worker: Any,
    log: RecordingLog,
    checkpoints: Any,
    state: TrainState | None = None,
    engines: Any = None,
    critic: Critic | None = None,
    teacher: Policy | None = None,
) -> Loop:
    """A loop around a trainer; `worker`, `log` and `engines` are what rank 0 has."""
    causes = MismatchAttribution(trainer.actor, trainer.collect_named_tensors, trainer.contract.engine_format)
    on_rank0 = Rank0(lambda: engines or NullEngine())
    of_critic = None if critic is None else CriticTrainer(config, critic)
    policy = PolicyTrainer(config, trainer.actor, reference, causes, on_rank0, critic=of_critic, teacher=teacher)
    recorder = Recorder(Rank0(lambda: log), on_rank0, StepProfiler(Path(), rank=0))
    return Loop(config, Rank0(lambda: worker), policy, sync, recorder, checkpoints, state)


def run_loop(
    folder: Path,
    precision: dict[str, Any],
    algorithm: dict[str, Any],
    steps: int,
    noise: float,
    attribute_every: int = 0,
    environment_logprob: float | None = None,
    worker_class: type[ScriptedWorker] = ScriptedWorker,
    critic: dict[str, Any] | None = None,
    teacher: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The rows of the log, the advantages of the last step's samples, and what `ScriptedWorker.evaluate` noted."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3, "steps": steps})
    config = Config.model_validate(
        {
            "model": {"path": folder}, "precision": precision, "train": {"steps": steps}, "algorithm": algorithm, "data": {"eval_every": 1},
            "rollout": {"prompts_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 8},
            "log": {"samples": GROUPS * SIZE, "attribute_every": attribute_every}, "critic": critic or {}, "teacher": teacher,
        }
    )  # fmt: skip
    reference = None
    if config.algorithm.kl_coef:
        model = freeze(build_model(trainer.hf_config, trainer.layout, trainer.contract))
        load_checkpoint(model, folder, trainer.shards)
        reference = Policy(model, 1.0, 4)
    log = RecordingLog()
    worker = worker_class(trainer.actor, noise, environment_logprob)
    critic_model = load_critic(config, trainer.layout, trainer.hf_config)
    loop_of(
        config,
        trainer,
        reference,
        NullSync(),
        worker,
        log,
        NullCheckpointManager(),
        critic=critic_model,
        teacher=load_teacher(config, trainer.layout),
    ).run()
    return {"rows": log.rows, "advantages": [row["advantage"] for row in log.samples_seen[-GROUPS * SIZE :]], "leads": worker.leads}


GROUPS, SIZE = 4, 4


class StreamedWorker:
    """Answers to a real stream's problems; the "engine's" log-probs come from the process's own random numbers, of all three kinds."""

    def __init__(self) -> None:
        self.stream = ProblemStream(ProblemOrder(lambda position: Problem(str(position), "", ""), "numbers"))

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return self.stream.snapshot()

    def begin(self, version: int) -> None: ...

    def collect(self, version: int) -> RolloutBatch:
        completions = []
        for problem in self.stream.next_batch(GROUPS):
            for member in range(SIZE):
                answer = [11 + member % 2] * (2 + member)
                logprobs = [-5.0 - random.random() - float(np.random.rand()) - float(torch.rand(())) for _ in answer]
                reward = Reward(float(member % 2), bool(member % 2))
                ids = np.array([5, 20 + int(problem.id), 7], np.int32), np.array(answer, np.int32)
                completions.append(Completion(problem, *ids, np.array(logprobs, np.float32), "stop", version, "", reward))
        return RolloutBatch(completions, {"ahead/generate": 1.0})

    def evaluate(self, version: int) -> RolloutBatch:
        return RolloutBatch([])


def config_of(
    folder: Path,
    steps: int,
    precision: dict[str, Any],
    every: int = 1,
    algorithm: dict[str, Any] | None = None,
    replay: dict[str, Any] | None = None,
) -> Config:
    return Config.model_validate(
        {
            "model": {"path": folder}, "precision": precision, "train": {"steps": steps, "learning_rate": 3e-3, "warmup_steps": 6},
            "algorithm": {"updates_per_step": 2, "calibrate_every": 1, "kl_coef": 0.01, "correction": "tis", **(algorithm or {})},
            "critic": {"learning_rate": 3e-3} if (algorithm or {}).get("advantage") == "gae" else {},
            "rollout": {"prompts_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 8}, "checkpoint": {"every": every, "keep": 2},
            "replay": replay,
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
    algorithm: dict[str, Any] | None = None,
    replay: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A run up to `steps`, new or going on from its newest whole checkpoint: the log's rows, the bytes this rank holds, messages.

    `broken`: where policy version 2 breaks, in its "sync", in its second "optimizer step" or before its first, in the "policy's update"; a
    last checkpoint is then tried.
    """
    layout = start(layout)
    config = config_of(folder, steps, precision, 0 if broken == "sync" else 1, algorithm, replay)
    trainer = Trainer(folder, precision, config.train.model_dump(mode="json"), layout=layout)
    actor, worker, messages = trainer.actor, StreamedWorker(), list[str]()
    critic = load_critic(config, layout, trainer.hf_config)
    of_critic = None if critic is None else (critic.model, critic.optimizer)
    # bounds that move back to the configured ones, half the way at every step
    state = TrainState(0, 0, (0.7, 1.3), worker.snapshot(), {})
    seed = 99 if go_on else 0
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    if go_on:
        saved = choose_checkpoint(run, steps)
        messages += saved.describe(describe_layout(layout, trainer.train))
        state = replace(TrainState.from_dict(saved.state), replay=read_groups(saved.folder) if dist.get_rank() == 0 else ())
        same_layout = saved.matches_layout(describe_layout(layout, trainer.train))
        load_run_checkpoint(saved.folder, trainer.model, actor.optimizer, saved.state, same_layout, of_critic)
        actor.steps_done = state.optimizer_steps
        if critic is not None:
            critic.steps_done = state.critic_steps
        worker.stream.load_state_dict(state.data())
    log = RecordingLog()
    checkpoints = CheckpointManager(config, layout, run, actor, trainer.hf_config, messages.append, state.version or -1, critic)
    sync = BrokenSync() if broken == "sync" else NullSync()
    loop = loop_of(config, trainer, reference(trainer), sync, worker, log, checkpoints, state, critic=critic)
    if broken == "optimizer step":
        break_optimizer(actor, 4)
    if broken == "policy's update":
        break_update(actor, 2)
    try:
        loop.run()
    except RunError as error:
        messages.append(str(error))
        messages += last_checkpoint(loop)
    held = trainer.dump_bytes() | moments(actor) | (dump_model(critic) if critic else {})
    return {"rows": log.rows, "samples": log.samples_seen, "bytes": held, "messages": messages}


class BrokenSync(NullSync):
    def run(self, version: int, meanwhile: Callable[[], None]) -> NullSync:
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


def break_update(actor: Actor, steps_done: int) -> None:
    update = actor.update

    def refuse(*args: Any) -> Any:
        if actor.steps_done == steps_done:
            raise RunError("stopped before an optimizer step")
        return update(*args)

    actor.update = refuse  # type: ignore[method-assign]


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


def dump_model(critic: Critic) -> dict[str, bytes]:
    """A critic's parameters, masters and moments, as this rank holds them, raw."""
    parameters = {name: tensor.detach().view(torch.uint8) for name, tensor in global_parameters(critic.model).items()}
    masters = {f"master {name}": tensor.detach() for name, tensor in master_state(critic).local_tensors().items()}
    tensors = {f"critic {name}": tensor.numpy().tobytes() for name, tensor in (parameters | masters).items()}
    return tensors | {f"critic {name}": value for name, value in moments(critic).items()}


def moments(actor: Actor) -> dict[str, bytes]:
    """Adam's moments and the 16-bit weights' masters, as this rank holds them, raw."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in optimizer_state(actor).local_tensors().items()}


def saved_and_loaded_state(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], dp: int) -> tuple[Any, Any]:
    """What this replica puts into a checkpoint after one step, and the same once 1 was added to what was loaded."""
    settings = {"clip_grad": 0.0, "adam_eps": 1e-4}  # clipped, the norm would be summed in another order
    actor = Trainer(folder, precision, settings, layout=Layout(dp=dp)).actor
    actor.update(own(batch), negative_log_likelihood)
    saved = copy_state(actor)
    for state, names in ((optimizer_state(actor), ("exp_avg", "exp_avg_sq", "master")), (master_state(actor), ("weight",))):
        state.load({name: tensor + 1 for name, tensor in saved.items() if name.startswith(names)})
    return saved, copy_state(actor)


def copy_state(actor: Actor) -> dict[str, torch.Tensor]:
    """A copy of the FP32 tensors that this rank puts into a checkpoint."""
    sharded = optimizer_state(actor).sharded_for_save() | master_state(actor).sharded_for_save()
    return {name: tensor.data.detach().clone() for name, tensor in sharded.items()}


def optimizer_state(actor: Actor) -> OptimizerState:
    return OptimizerState(actor.optimizer, [chunk.sharded_state_dict() for chunk in actor.chunks])


def master_state(actor: Actor) -> MasterState:
    layers = [layer for chunk in actor.chunks for layer in find_quantized_layers(chunk).values()]
    return MasterState(layers, [chunk.sharded_state_dict() for chunk in actor.chunks])


def load_in(folder: Path, run: Path, precision: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """What a layout holds after loading a run's newest checkpoint: masters, scales of keys and values, masters after one more optimizer
    step."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3}, layout=layout)
    saved = choose_checkpoint(run, 99)
    load_run_checkpoint(
        saved.folder, trainer.model, trainer.actor.optimizer, saved.state, saved.matches_layout(describe_layout(layout, trainer.train))
    )
    masters, scales = trainer.collect_tensors(fp8=False), collect_scales(trainer.model)
    trainer.actor.steps_done = saved.state["optimizer_steps"]
    trainer.actor.update(own(random_sequences(4, seed=5)), negative_log_likelihood)
    return {
        "masters": masters,
        "scales": scales,
        "after": trainer.collect_tensors(fp8=False),
        "remarks": saved.describe(describe_layout(layout, trainer.train)),
    }


def adopted_after_loading(folder: Path, run: Path, precision: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Saves the trainer of an FP8 checkpoint, after a step or before any, and loads it into a fresh one: layers whose blocks are the
    checkpoint's in both, and names of named_tensors that differ."""
    first, second = (Trainer(folder, precision) for _ in range(2))
    if trained:
        first.actor.update(own(random_sequences(4, seed=5)), negative_log_likelihood)
    config = config_of(folder, 99, precision)
    state = TrainState(1, first.actor.steps_done, (0.8, 1.2), dict)
    CheckpointManager(config, first.layout, run, first.actor, first.hf_config, print, -1).write(state, last=True)
    saved = choose_checkpoint(run, 99)
    load_run_checkpoint(saved.folder, second.model, second.actor.optimizer, saved.state, True)
    adopted = [[layer.adopted for layer in find_quantized_layers(trainer.model).values()] for trainer in (first, second)]
    before, after = first.collect_named_tensors(), second.collect_named_tensors()
    raw = {name: (before[name].contiguous().view(torch.uint8), after[name].contiguous().view(torch.uint8)) for name in before}
    return {"adopted": adopted, "different": [name for name, (one, two) in raw.items() if not torch.equal(one, two)]}


def save_without_room(folder: Path, run: Path, precision: dict[str, Any], step: int) -> list[str]:
    """Try to save where no file may be longer than 64 KiB; return the messages."""
    trainer, messages = Trainer(folder, precision), list[str]()
    config = config_of(folder, 99, precision)
    checkpoints = CheckpointManager(config, trainer.layout, run, trainer.actor, trainer.hf_config, messages.append, -1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        checkpoints.write(TrainState(step, trainer.actor.steps_done, (0.8, 1.2), dict), last=False)
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return messages


def train_with_watchdog(folder: Path, run: Path, precision: dict[str, Any], stuck_after: float) -> None:
    """Train for ever; the watchdog's message is written to `run`/message."""
    start(layout := Layout(tp=2))
    run.mkdir(exist_ok=True)
    rank = dist.get_rank()
    with (
        rank_log(run, rank, 2) as log,
        hang_watchdog.watch_for_hangs(run, rank, 2, stuck_after, log, lambda line: (run / "message").write_text(f"rank {rank}: {line}")),
    ):
        train_to(folder, run, 1_000_000, precision, layout=layout)


def break_after_a_signal(rank: int) -> RunError:
    """What ends a run that breaks on all ranks after that one got SIGUSR1."""
    start(Layout(tp=2))
    install_signal_handlers(alone=False)
    if dist.get_rank() == rank:
        signal.raise_signal(signal.SIGUSR1)
    return prefer_stop_error(RunError("the engine is gone"))


CHANGED = "linear_fc1.weight"


def measure_causes(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], fault: str = "") -> dict[str, float]:
    """The metrics of the ladder. `fault`: the engine computes a little otherwise ("kernels"), scales its inputs in the other format
    ("activations"), holds a first scale that is twice as large ("weights"), caches in E4M3 ("kv"), or an optimizer step follows
    ("version")."""
    trainer = Trainer(folder, precision)
    actor, named_tensors, format = trainer.actor, trainer.collect_named_tensors(), trainer.contract.engine_format
    if fault == "activations":
        format = replace(format, scale_format={"pow2": "fp32", "fp32": "pow2"}[format.scale_format])
    if fault == "weights":
        name = next(name for name in named_tensors if f"{CHANGED}_scale" in name)
        named_tensors[name] = named_tensors[name].clone()
        named_tensors[name].view(-1)[0] *= 2
    cached = emulate_cache(actor.model) if fault == "kv" else nullcontext()
    with cached, emulate_engine(actor.model, named_tensors, format):
        sampled = actor.compute_logprobs(batch)[0]
    for answer, engine, trainers in zip(batch, sampled, actor.compute_logprobs(batch)[0], strict=True):
        answer.rollout_logprobs = engine + 0.01 * torch.randn(engine.shape, generator=torch.Generator().manual_seed(0)) * (
            fault == "kernels"
        )
        answer.old_logprobs = trainers
    causes = MismatchAttribution(actor, lambda: named_tensors, format, fault == "kv")
    causes.measure(batch)
    if fault == "version":
        actor.update(batch, PolicyLoss(AlgorithmConfig()))
    return causes.finish()


def make_run(config: DemoConfig, folder: Path, step: int) -> Path:
    """Makes `config.model` and saves it as the checkpoint of `step` in the run folder `folder`; returns the checkpoint."""
    warm_start.make_model(config)
    layout = Layout()
    start_megatron(layout, 0)
    hf_config = read_config(config.model.path)
    model = build_model(hf_config, layout, PrecisionContract.from_config(config.precision))
    load_checkpoint(model, config.model.path, build_rank_shards(hf_config, layout))
    Actor(model, TrainConfig(), 1.0)  # holds the masters
    saved = folder / "checkpoints" / f"step_{step:05d}"
    state = {"step": step, "policy_version": step, "precision": config.precision.model_dump(mode="json")}
    (folder / "checkpoints").mkdir(parents=True)
    CheckpointWriter(saved, model, hf_config, config.model.path, state).finish()
    run = {"status": "finished", "reason": "", "started": None, "ended": None, "versions": {}, "config": {}}
    (folder / "run.json").write_text(json.dumps(run))
    return saved
