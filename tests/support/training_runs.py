"""The training loop with a scripted rollout: runs that learn, resume, hang, or have a planted mismatch."""

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
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from examples.arithmetic import warm_start
from examples.arithmetic.config import DemoConfig
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.replay import read_groups
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.data import ProblemOrder, ProblemStream
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import Actor, Critic, Policy
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.optimizer import MasterState, OptimizerState
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.model import build_model, freeze
from megatron_rl.mcore.passes.engine_emulation import emulate_cache, emulate_engine
from megatron_rl.mcore.weights.cache_scales import collect_scales
from megatron_rl.mcore.weights.load_weights import global_parameters, load_checkpoint
from megatron_rl.metrics import UndeclaredMetricWarning, warn_undeclared
from megatron_rl.observability import hang_watchdog
from megatron_rl.observability.profiling import StepProfiler
from megatron_rl.observability.rank_log import rank_log
from megatron_rl.observability.signals import install_signal_handlers, prefer_stop_error
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
"""The token that every rewarded response consists of, and the token of the other responses."""
ENVIRONMENT_TOKENS = [13, 14]
"""What an environment writes."""
ROLLOUT = {"prompts_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 8}


def make_completion(
    problem: Problem, member: int, ids: tuple[Any, Any], logprobs: list[float], version: int, mask: np.ndarray | None = None
) -> Completion:
    """Return a completion of prompt and response `ids`. Every second member of a group is rewarded."""
    prompt, response = (np.array(each, np.int32) for each in ids)
    reward = Reward(float(member % 2), bool(member % 2))
    return Completion(problem, prompt, response, np.array(logprobs, np.float32), "stop", version, "", reward, response_mask_T=mask)


class ScriptedWorker:
    """A rollout worker that always returns the same groups. Log-probs are the trainer's plus a little noise.

    If `environment_logprob` is given, an environment speaks after the first token of each response; its tokens get this log-prob.
    """

    def __init__(self, actor: Actor, noise: float, environment_logprob: float | None) -> None:
        self.actor, self._noise, self._environment_logprob, self._source = actor, noise, environment_logprob, random.Random(0)
        self.leads: list[float] = []

    def sequences(self) -> list[TrainingSample]:
        members = [(group, member) for group in range(GROUPS) for member in range(SIZE)]
        samples = [TrainingSample([5, 6 + group, 7], [GOOD if member % 2 else BAD] * (2 + member)) for group, member in members]
        for sequence in samples if self._environment_logprob is not None else []:
            mask = [True, *[False] * len(ENVIRONMENT_TOKENS), *[True] * (len(sequence.response_ids) - 1)]
            first, *rest = sequence.response_ids.split([1, len(sequence.response_ids) - 1])
            sequence.response_ids, sequence.response_mask = torch.cat([first, torch.tensor(ENVIRONMENT_TOKENS), *rest]), torch.tensor(mask)
        return samples

    def begin(self, version: int) -> None: ...

    def collect(self, version: int) -> RolloutBatch:
        completions = []
        for number, (sequence, values) in enumerate(zip(self.sequences(), self.actor.compute_logprobs(self.sequences())[0], strict=True)):
            logprobs = [value + self._source.gauss(0, self._noise) for value in values.tolist()]
            if self._environment_logprob is not None:
                logprobs[1:1] = [self._environment_logprob] * len(ENVIRONMENT_TOKENS)
            ids, mask = (
                (sequence.prompt_ids, sequence.response_ids),
                sequence.response_mask.numpy() if len(sequence.response_mask) else None,
            )
            completions.append(make_completion(Problem(str(number), "", ""), number, ids, logprobs, version, mask))
        return RolloutBatch(completions, {"ahead/generate": 1.0})

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return dict

    def evaluate(self, version: int) -> RolloutBatch:
        """Append to `leads` how much likelier good tokens are than bad ones, in nats."""
        logprobs = self.actor.compute_logprobs(self.sequences())[0]
        good, bad = (torch.cat([part for number, part in enumerate(logprobs) if number % 2 == which]).mean() for which in (1, 0))
        self.leads.append(float(good - bad))
        return RolloutBatch([])


class StreamedWorker:
    """A rollout worker that answers the problems of a real stream. Log-probs come from the process's random numbers, of all three kinds."""

    def __init__(self) -> None:
        self.stream = ProblemStream(ProblemOrder(lambda position: Problem(str(position), "", ""), "numbers"))

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        return self.stream.snapshot()

    def begin(self, version: int) -> None: ...

    def collect(self, version: int) -> RolloutBatch:
        completions = []
        for problem in self.stream.next_batch(GROUPS):
            for member in range(SIZE):
                ids = [5, 20 + int(problem.id), 7], [11 + member % 2] * (2 + member)
                logprobs = [-5.0 - random.random() - float(np.random.rand()) - float(torch.rand(())) for _ in ids[1]]
                completions.append(make_completion(problem, member, ids, logprobs, version))
        return RolloutBatch(completions, {"ahead/generate": 1.0})

    def evaluate(self, version: int) -> RolloutBatch:
        return RolloutBatch([])


class NullSync:
    """A weight sync that does nothing."""

    def run(self, version: int, meanwhile: Callable[[], None]) -> NullSync:
        meanwhile()
        return self

    def run_with_recovery(self, version: int, work: Callable[[], T]) -> T:
        return work()

    def metrics(self) -> dict[str, float]:
        return {}


class NullCheckpointManager:
    def write(self, mark: TrainState, last: bool) -> None: ...
    def poll(self) -> None: ...
    def wait(self) -> None: ...


class RecordingLog:
    """A run log that keeps its rows and samples in memory."""

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
    """Return the loop around a trainer. Rank 0 has `worker`, `log` and `engines`."""
    causes = MismatchAttribution(trainer.actor, trainer.collect_named_tensors, trainer.contract.engine_format)
    on_rank0 = Rank0(lambda: engines or mock.Mock(get_memory_mb=lambda: 0.0, release_memory=lambda: None))
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
    """Run the loop with a scripted worker. Return the log's rows, the advantages of the last step's samples, and the worker's `leads`."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3, "steps": steps})
    config = Config.model_validate(
        {
            "model": {"path": folder}, "precision": precision, "train": {"steps": steps}, "algorithm": algorithm, "data": {"eval_every": 1},
            "rollout": ROLLOUT, "log": {"samples": GROUPS * SIZE, "attribute_every": attribute_every}, "critic": critic or {},
            "teacher": teacher,
        }
    )  # fmt: skip
    policy = reference(trainer) if config.algorithm.kl_coef else None
    log, worker = RecordingLog(), worker_class(trainer.actor, noise, environment_logprob)
    models = {"critic": load_critic(config, trainer.layout, trainer.hf_config), "teacher": load_teacher(config, trainer.layout)}
    loop_of(config, trainer, policy, NullSync(), worker, log, NullCheckpointManager(), **models).run()
    return {"rows": log.rows, "advantages": [row["advantage"] for row in log.samples_seen[-GROUPS * SIZE :]], "leads": worker.leads}


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
            "rollout": ROLLOUT, "checkpoint": {"every": every, "keep": 2}, "replay": replay,
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
    """Run up to `steps`, new or from the newest whole checkpoint. Return the log's rows, the bytes that this rank holds, and messages.

    Args:
        broken: where policy version 2 breaks: in its "sync", in its second "optimizer step", or before its first (the "policy's update").
            A last checkpoint is attempted afterwards.
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
    log, sync = RecordingLog(), NullSync()
    checkpoints = CheckpointManager(config, layout, run, actor, trainer.hf_config, messages.append, state.version or -1, critic)
    loop = loop_of(config, trainer, reference(trainer), sync, worker, log, checkpoints, state, critic=critic)
    if broken == "sync":
        break_at(sync, "run", lambda version, _: version == 2, "the engine is gone")
    if broken == "optimizer step":  # half of a step's changes are made
        zero = lambda: next(actor.chunks[0].parameters()).data.zero_()  # noqa: E731
        break_at(actor.optimizer, "step", lambda: actor.steps_done == 4 and zero() is not None, "stopped in an optimizer step")
    if broken == "policy's update":
        break_at(actor, "update", lambda *_: actor.steps_done == 2, "stopped before an optimizer step")
    try:
        loop.run()
    except RunError as error:
        messages.append(str(error))
        try:
            loop.save(last=True)
        except RunError as refused:
            messages.append(str(refused))
    held = trainer.dump_bytes() | moments(actor) | (dump_model(critic) if critic else {})
    return {"rows": log.rows, "samples": log.samples_seen, "bytes": held, "messages": messages}


def break_at(owner: Any, name: str, condition: Callable[..., bool], line: str) -> None:
    """Let a method raise a RunError instead of running when `condition` holds for its arguments."""
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        if condition(*args):
            raise RunError(line)
        return method(*args)

    setattr(owner, name, call)


def reference(trainer: Trainer) -> Policy:
    model = freeze(build_model(trainer.hf_config, trainer.layout, trainer.contract, trainer.train))
    load_checkpoint(model, trainer.folder, trainer.shards)
    return Policy(model, 1.0, 64)


def dump_model(critic: Critic) -> dict[str, bytes]:
    """Return the raw bytes of a critic's parameters, masters and moments that this rank holds."""
    parameters = {name: tensor.detach().view(torch.uint8) for name, tensor in global_parameters(critic.model).items()}
    masters = {f"master {name}": tensor.detach() for name, tensor in master_state(critic).local_tensors().items()}
    tensors = {f"critic {name}": tensor.numpy().tobytes() for name, tensor in (parameters | masters).items()}
    return tensors | {f"critic {name}": value for name, value in moments(critic).items()}


def moments(actor: Actor) -> dict[str, bytes]:
    """Return the raw bytes of Adam's moments and the masters of 16-bit weights that this rank holds."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in optimizer_state(actor).local_tensors().items()}


def saved_and_loaded_state(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], dp: int) -> tuple[Any, Any]:
    """Return what this replica puts into a checkpoint after one step, and again after it has loaded those values plus 1."""
    settings = {"clip_grad": 0.0, "adam_eps": 1e-4}  # clipped, the norm would be summed in another order
    actor = Trainer(folder, precision, settings, layout=Layout(dp=dp)).actor
    actor.update(own(batch), negative_log_likelihood)
    saved = copy_state(actor)
    for state, names in ((optimizer_state(actor), ("exp_avg", "exp_avg_sq", "master")), (master_state(actor), ("weight",))):
        state.load({name: tensor + 1 for name, tensor in saved.items() if name.startswith(names)})
    return saved, copy_state(actor)


def copy_state(actor: Actor) -> dict[str, torch.Tensor]:
    """Return a copy of the FP32 tensors that this rank puts into a checkpoint."""
    sharded = optimizer_state(actor).sharded_for_save() | master_state(actor).sharded_for_save()
    return {name: tensor.data.detach().clone() for name, tensor in sharded.items()}


def optimizer_state(actor: Actor) -> OptimizerState:
    return OptimizerState(actor.optimizer, [chunk.sharded_state_dict() for chunk in actor.chunks])


def master_state(actor: Actor) -> MasterState:
    layers = [layer for chunk in actor.chunks for layer in find_quantized_layers(chunk).values()]
    return MasterState(layers, [chunk.sharded_state_dict() for chunk in actor.chunks])


def load_in(folder: Path, run: Path, precision: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Load a run's newest checkpoint. Return masters, key-value scales, remarks, and the masters after one more optimizer step."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3}, layout=layout)
    saved, place = choose_checkpoint(run, 99), describe_layout(layout, trainer.train)
    load_run_checkpoint(saved.folder, trainer.model, trainer.actor.optimizer, saved.state, saved.matches_layout(place))
    result = {"masters": trainer.collect_tensors(fp8=False), "scales": collect_scales(trainer.model), "remarks": saved.describe(place)}
    trainer.actor.steps_done = saved.state["optimizer_steps"]
    trainer.actor.update(own(random_sequences(4, seed=5)), negative_log_likelihood)
    return result | {"after": trainer.collect_tensors(fp8=False)}


def adopted_after_loading(folder: Path, run: Path, precision: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Save the trainer of an FP8 checkpoint, after a step or before any, and load it into a fresh one. Return which layers of both still
    have the checkpoint's blocks (`adopted`), and the names of tensors that differ."""
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
    """Try to save while no file may exceed 64 KiB; return the messages."""
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
    """Train forever. The watchdog's message is written to `run`/message."""
    start(layout := Layout(tp=2))
    run.mkdir(exist_ok=True)
    rank = dist.get_rank()
    with (
        rank_log(run, rank, 2) as log,
        hang_watchdog.watch_for_hangs(run, rank, 2, stuck_after, log, lambda line: (run / "message").write_text(f"rank {rank}: {line}")),
    ):
        train_to(folder, run, 1_000_000, precision, layout=layout)


def break_after_a_signal(rank: int) -> RunError:
    """Return the error that ends a run that breaks on all ranks after `rank` got SIGUSR1."""
    start(Layout(tp=2))
    install_signal_handlers(alone=False)
    if dist.get_rank() == rank:
        signal.raise_signal(signal.SIGUSR1)
    return prefer_stop_error(RunError("the engine is gone"))


CHANGED = "linear_fc1.weight"


def measure_causes(folder: Path, precision: dict[str, Any], batch: list[TrainingSample], fault: str = "") -> dict[str, float]:
    """Return the metrics of the mismatch attribution.

    Args:
        fault: the engine computes slightly different log-probs ("kernels"), scales its inputs in the other format ("activations"), holds a
            first scale that is twice as large ("weights") or caches in E4M3 ("kv"), or an optimizer step follows ("version").
    """
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
    """Make `config.model` and save it as the checkpoint of `step` in the run folder `folder`; return the checkpoint."""
    warm_start.make_model(config)
    trainer = Trainer(config.model.path, config.precision.model_dump(), layout=Layout())
    (folder / "checkpoints").mkdir(parents=True)
    run = {"status": "finished", "reason": "", "started": None, "ended": None, "versions": {}, "config": {}}
    (folder / "run.json").write_text(json.dumps(run))
    return trainer.save(folder / "checkpoints" / f"step_{step:05d}", step)
