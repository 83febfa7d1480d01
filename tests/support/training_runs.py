"""The training loop with a scripted rollout: runs that learn, resume, hang, or have a planted mismatch."""

import random
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithm.old_logprobs import OldLogprobs
from megatron_rl.batch.replay import read_groups
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.data import ProblemOrder, ProblemStream
from megatron_rl.diagnosis.attribution import MismatchAttribution
from megatron_rl.diagnosis.mismatch import MismatchBound
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.base.names import freeze
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.optimizer import MasterState, OptimizerState
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.model import build_model
from megatron_rl.mcore.weights.load_weights import global_parameters, load_checkpoint
from megatron_rl.metrics import UndeclaredMetricWarning, warn_undeclared
from megatron_rl.observability.profiling import StepProfiler
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.training.checkpoint_manager import CheckpointManager, TrainState
from megatron_rl.training.critic_trainer import CriticTrainer
from megatron_rl.training.loop import Loop
from megatron_rl.training.policies import load_critic, load_teacher
from megatron_rl.training.policy_trainer import PolicyTrainer
from megatron_rl.training.recorder import Recorder
from megatron_rl.training.resume import choose_checkpoint, describe_layout
from megatron_rl.types import Completion, Problem, Reward
from support.trainer import Trainer, start

GROUPS, SIZE = 4, 4
GOOD, BAD = 11, 12
"""The token that every rewarded response consists of, and the token of the other responses."""
ENVIRONMENT_TOKENS = [13, 14]
"""What an environment writes."""
ROLLOUT = {"prompts_per_step": GROUPS, "group_size": SIZE, "max_new_tokens": 8}


def make_completion(problem, member, ids, logprobs, version, mask=None):
    """Return a completion of prompt and response `ids`. Every second member of a group is rewarded."""
    prompt, response = (np.array(each, np.int32) for each in ids)
    reward = Reward(float(member % 2), bool(member % 2))
    return Completion(problem, prompt, response, np.array(logprobs, np.float32), "stop", version, "", reward, response_mask_T=mask)


class ScriptedWorker:
    """A rollout worker that always returns the same groups. Log-probs are the trainer's plus a little noise.

    If `environment_logprob` is given, an environment speaks after the first token of each response; its tokens get this log-prob.
    """

    def __init__(self, actor, noise, environment_logprob):
        self.actor, self._noise, self._environment_logprob, self._source = actor, noise, environment_logprob, random.Random(0)
        self.leads = []

    def sequences(self):
        members = [(group, member) for group in range(GROUPS) for member in range(SIZE)]
        samples = [TrainingSample([5, 6 + group, 7], [GOOD if member % 2 else BAD] * (2 + member)) for group, member in members]
        for sequence in samples if self._environment_logprob is not None else []:
            mask = [True, *[False] * len(ENVIRONMENT_TOKENS), *[True] * (len(sequence.response_ids) - 1)]
            first, *rest = sequence.response_ids.split([1, len(sequence.response_ids) - 1])
            sequence.response_ids, sequence.response_mask = torch.cat([first, torch.tensor(ENVIRONMENT_TOKENS), *rest]), torch.tensor(mask)
        return samples

    def begin(self, version): ...

    def collect(self, version):
        completions = []
        for number, (sequence, values) in enumerate(zip(self.sequences(), self.actor.compute_logprobs(self.sequences())[0], strict=True)):
            logprobs = [value + self._source.gauss(0, self._noise) for value in values.tolist()]
            if self._environment_logprob is not None:
                logprobs[1:1] = [self._environment_logprob] * len(ENVIRONMENT_TOKENS)
            ids, mask = (sequence.prompt_ids, sequence.response_ids), sequence.response_mask
            mask = mask.numpy() if len(mask) else None
            completions.append(make_completion(Problem(str(number), "", ""), number, ids, logprobs, version, mask))
        return RolloutBatch(completions, {"ahead/generate": 1.0})

    def snapshot(self):
        return dict

    def evaluate(self, version):
        """Append to `leads` how much likelier good tokens are than bad ones, in nats."""
        logprobs = self.actor.compute_logprobs(self.sequences())[0]
        good, bad = (torch.cat([part for number, part in enumerate(logprobs) if number % 2 == which]).mean() for which in (1, 0))
        self.leads.append(float(good - bad))
        return RolloutBatch([])


class StreamedWorker:
    """A rollout worker that answers the problems of a real stream. Log-probs come from the process's random numbers, of all three kinds."""

    def __init__(self):
        self.stream = ProblemStream(ProblemOrder(lambda position: Problem(str(position), "", ""), "numbers"))

    def snapshot(self):
        return self.stream.snapshot()

    def begin(self, version): ...

    def collect(self, version):
        completions = []
        for problem in self.stream.next_batch(GROUPS):
            for member in range(SIZE):
                ids = [5, 20 + int(problem.id), 7], [11 + member % 2] * (2 + member)
                logprobs = [-5.0 - random.random() - float(np.random.rand()) - float(torch.rand(())) for _ in ids[1]]
                completions.append(make_completion(problem, member, ids, logprobs, version))
        return RolloutBatch(completions, {"ahead/generate": 1.0})

    def evaluate(self, version):
        return RolloutBatch([])


class NullSync:
    """A weight sync that does nothing."""

    def run(self, version, meanwhile):
        meanwhile()
        return self

    def run_with_recovery(self, version, work):
        return work()

    def metrics(self):
        return {}


class NullCheckpointManager:
    def write(self, mark, last): ...
    def poll(self): ...
    def wait(self): ...


class RecordingLog:
    """A run log that keeps its rows and samples in memory."""

    def __init__(self):
        self.rows = []
        self.samples_seen = []

    def set_phase(self, phase): ...

    def write_step(self, metrics):
        with warnings.catch_warnings(action="error", category=UndeclaredMetricWarning):
            warn_undeclared(metrics)
        self.rows.append(metrics)

    def write_samples(self, step, rows):
        self.samples_seen += rows


def loop_of(config, trainer, reference, sync, worker, log, checkpoints, state=None, engines=None, critic=None, teacher=None, exact=False):
    """Return the loop around a trainer. Rank 0 has `worker`, `log` and `engines`. `exact`: whether the run promises a mismatch of 0."""
    causes = MismatchAttribution(trainer.actor, trainer.collect_named_tensors, trainer.contract.engine_format)
    on_rank0 = Rank0(lambda: engines or mock.Mock(get_memory_mb=lambda: 0.0, release_memory=lambda: None))
    of_critic = None if critic is None else CriticTrainer(config, critic)
    bound, old_logprobs = MismatchBound(config.sync, exact, print), OldLogprobs(config, exact)
    policy = PolicyTrainer(config, trainer.actor, reference, causes, on_rank0, bound, None, old_logprobs, of_critic, teacher)
    recorder = Recorder(Rank0(lambda: log), on_rank0, StepProfiler(Path(), rank=0))
    rank0_worker = Rank0(lambda: worker)
    return Loop(config, rank0_worker, policy, sync, recorder, checkpoints, state)


def run_loop(
    folder, precision, algorithm, steps, noise, attribute_every=0, environment_logprob=None, worker=ScriptedWorker, exact=False, **sections
):
    """Run the loop with a scripted worker. Return the log's rows, the advantages of the last step's samples, and the worker's `leads`."""
    trainer = Trainer(folder, precision, {"learning_rate": 1e-3, "steps": steps})
    sections |= {"data": {"eval_every": 1}, "log": {"samples": GROUPS * SIZE, "attribute_every": attribute_every}}
    config = config_of(folder, precision, train={"steps": steps}, algorithm=algorithm, **sections)
    policy = reference(trainer) if config.algorithm.kl_coef else None
    log, worker = RecordingLog(), worker(trainer.actor, noise, environment_logprob)
    models = {"critic": load_critic(config, trainer.layout, trainer.hf_config), "teacher": load_teacher(config, trainer.layout)}
    loop_of(config, trainer, policy, NullSync(), worker, log, NullCheckpointManager(), exact=exact, **models).run()
    return {"rows": log.rows, "advantages": [row["advantage"] for row in log.samples_seen[-GROUPS * SIZE :]], "leads": worker.leads}


def without_times(rows):
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "memory/"))} for row in rows]


def config_of(folder, precision, **sections):
    return Config.model_validate({"model": {"path": folder}, "precision": precision, "rollout": ROLLOUT, **sections})


def resumable_config(folder, steps, precision, every=1, algorithm=None, replay=None, changes=None):
    """Return the configuration of a run that checkpoints `every` so many steps. `changes`: of the section [train]."""
    algorithm = {"updates_per_step": 2, "calibrate_every": 1, "kl_coef": 0.01, "correction": "tis", **(algorithm or {})}
    critic = {"learning_rate": 3e-3} if algorithm.get("advantage") == "gae" else {}
    train, checkpoint = {"steps": steps, "learning_rate": 3e-3, "warmup_steps": 6, **(changes or {})}, {"every": every, "keep": 2}
    return config_of(folder, precision, train=train, algorithm=algorithm, critic=critic, checkpoint=checkpoint, replay=replay)


def train_to(folder, run, steps, precision, go_on=False, layout=None, broken="", algorithm=None, replay=None, changes=None):
    """Run up to `steps`, new or from the newest whole checkpoint. Return the log's rows, the bytes that this rank holds, and messages.

    Args:
        broken: where policy version 2 breaks: in its "sync", in its second "optimizer step", or before its first (the "policy's update").
            A last checkpoint is attempted afterwards.
    """
    layout = start(layout)
    config = resumable_config(folder, steps, precision, 0 if broken == "sync" else 1, algorithm, replay, changes)
    trainer = Trainer(folder, precision, config.train.model_dump(mode="json"), layout=layout)
    actor, worker, messages = trainer.actor, StreamedWorker(), []
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


def break_at(owner, name, condition, line):
    """Let a method raise a RunError instead of running when `condition` holds for its arguments."""
    method = getattr(owner, name)

    def call(*args):
        if condition(*args):
            raise RunError(line)
        return method(*args)

    setattr(owner, name, call)


def reference(trainer):
    model = freeze(build_model(trainer.hf_config, trainer.layout, trainer.contract, trainer.train))
    load_checkpoint(model, trainer.folder, trainer.shards)
    return Policy(model, 1.0, 64)


def dump_model(critic):
    """Return the raw bytes of a critic's parameters, masters and moments that this rank holds."""
    parameters = {name: tensor.detach().view(torch.uint8) for name, tensor in global_parameters(critic.model).items()}
    masters = {f"master {name}": tensor.detach() for name, tensor in master_state(critic).local_tensors().items()}
    tensors = {f"critic {name}": tensor.numpy().tobytes() for name, tensor in (parameters | masters).items()}
    return tensors | {f"critic {name}": value for name, value in moments(critic).items()}


def moments(actor):
    """Return the raw bytes of Adam's moments and the masters of 16-bit weights that this rank holds."""
    return {name: tensor.detach().numpy().tobytes() for name, tensor in optimizer_state(actor).local_tensors().items()}


def optimizer_state(actor):
    return OptimizerState(actor.optimizer, [chunk.sharded_state_dict() for chunk in actor.chunks])


def master_state(actor):
    layers = [layer for chunk in actor.chunks for layer in find_quantized_layers(chunk).values()]
    return MasterState(layers, [chunk.sharded_state_dict() for chunk in actor.chunks])
