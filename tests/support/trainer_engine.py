"""A trainer with real SGLang engines, in any layout, on the ranks of a `World`. Only rank 0 has the engines."""

import os
import string
import sys
from contextlib import closing, contextmanager
from dataclasses import asdict
from operator import attrgetter

import torch
import torch.distributed as dist

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.diagnosis.canary import make_canary
from megatron_rl.diagnosis.graph_check import GraphComparison, read_training_graph
from megatron_rl.distributed import Rank0, is_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.engine_emulation import emulate_engine
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from megatron_rl.mcore.weights.cache_scales import collect_scales, renew_scales
from megatron_rl.mcore.weights.load_weights import load_checkpoint
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE
from megatron_rl.rollout.engine_pool import start_engines
from megatron_rl.rollout.environments.base import Message
from megatron_rl.rollout.environments.pool import EnvironmentPool
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.sync.checks import check_live_engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import RecoveringWeightSync, WeightSync
from megatron_rl.types import Problem, SamplingParams
from parallel.digest import view_rect
from parallel.model_geometry import ModelGeometry
from parallel.shards import Rect
from support.engine_faults import strike_while, sync_through
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

    def __init__(self, checkpoint, folder, precision, sections=None, layout=None, engine_model=None):
        self.folder, self.messages, self.is_empty = folder, [], engine_model is None
        self.trainer = Trainer(checkpoint, precision, {"learning_rate": 3e-3}, layout=layout)
        sections = {**(sections or {})}
        sections["rollout"] = {**ROLLOUT, **sections.get("rollout", {})}
        if sections["rollout"].get("nodes_per_engine", 1) > 1:
            os.environ.setdefault(LAUNCHER_VARIABLE, "env\n")
        self.config = Config.model_validate({"model": {"path": checkpoint}, "precision": precision, **sections})
        self.start_engines(engine_model)

    @property
    def engines(self):
        """The engines, on rank 0."""
        return self.rank0_engines.value

    def start_engines(self, model):
        """Start engines on a checkpoint, or empty engines."""

        def start():
            if model is not None:
                return start_engines(self.config, model, self.folder, self.messages.append)
            (empty := self.folder / "engine_model").mkdir(exist_ok=True)
            write_all_but_weights(empty, describe_weights(self.trainer.hf_config, self.trainer.contract), self.trainer.folder)
            return start_engines(self.config, empty, self.folder, self.messages.append, empty=True)

        self.rank0_engines = Rank0(start)

    def plan(self, bucket_bytes=MIB):
        geometry, engines = ModelGeometry.from_hf_config(self.trainer.hf_config), self.config.rollout.to_layout()
        return SyncPlan.make(geometry, self.trainer.layout, engines, self.trainer.contract, bucket_bytes)

    def weight_sync(self, bucket_bytes=MIB, settings=None):
        """Context manager with a sync in buckets of at most `bucket_bytes`. `settings` replace the configuration's section; a canary
        runs if they ask for one."""
        config = SyncConfig.model_validate(settings) if settings else self.config.sync
        asked = self.config.model_copy(update={"sync": config})
        canary = make_canary(asked, self.trainer.actor, self.trainer.hf_config) if settings and "canary" in settings else None
        return closing(WeightSync(self.plan(bucket_bytes), self.rank0_engines, self.trainer.collect_named_tensors, config, canary))

    @contextmanager
    def recovering_sync(self, bucket_bytes=MIB, settings=None):
        """Context manager with a `weight_sync` that replaces lost engines."""
        with self.weight_sync(bucket_bytes, settings) as sync:
            yield RecoveringWeightSync(sync, self.rank0_engines, self.messages.append)

    def sample(self, prompts, tokens, **sampling):
        """Return completions of every prompt, on all ranks."""
        params = SamplingParams(1.0, tokens, **sampling)
        generations = []
        self.rank0_engines.run(lambda engines: generations.extend(engines.generate(prompts, params)))
        dist.broadcast_object_list(everything := [generations])
        return everything[0]

    def compute_logprobs(self, samples):
        """Return the trainer's log-probs of all sampled tokens, concatenated."""
        return torch.cat(compute_all_logprobs(self.trainer.actor, samples)[0])


_current, _changes = [], {}


def current():
    """Return what `start` has created in this process."""
    return _current[0]


def ask(path, *args):
    """Call a method of what `start` has created, by its path, such as "engines.stop"."""
    return attrgetter(path)(current())(*args)


def break_transformer_engine(folder):
    """Let child processes find a Transformer Engine that cannot be imported, as when its libraries do not fit."""
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text("raise FileNotFoundError('libtransformer_engine.so')")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])


def start(*args):
    """Start a trainer and its engines with the arguments of `TrainerAndEngines`. Empty engines are filled as policy version 0."""
    _current[:] = [TrainerAndEngines(*args)]
    if current().is_empty:
        sync(0)


def start_architecture(kind, folder, precision, layout, rollout, empty, **changes):
    """Start a model of an architecture with random weights of seed 0, and engines with these settings that load it, or that are empty.
    `changes`: to its config.json."""
    start_trainer(layout)
    _changes.update(changes)
    model = _write_architecture(kind, folder / "model", precision, layout, seed=0)
    sections = {"rollout": {"max_total_tokens": 4096, **rollout}}
    _current[:] = [TrainerAndEngines(model, folder, precision, sections, layout, None if empty else model)]


def _write_architecture(kind, folder, precision, layout, seed):
    """Write a checkpoint on rank 0, with as many layers as the stages need. Return its folder."""
    if is_rank0():
        layers = max(2, layout.pp * layout.vpp + layout.first_stage_layers)
        write_model(folder, kind, precision, seed, **{"num_hidden_layers": layers} | _changes)
    dist.barrier()
    return folder


def change_weights(kind, seed):
    """Give the trainer of `start_architecture` the weights of another seed, without telling the engine."""
    trainer = current().trainer
    precision = trainer.precision.model_dump()
    model = _write_architecture(kind, current().folder / f"model{seed}", precision, trainer.layout, seed)
    load_checkpoint(trainer.model, model, trainer.shards)
    if trainer.contract.scales_kv_by_layer:
        with renew_scales(trainer.model):
            trainer.actor.compute_logprobs(own(random_sequences(2, seed)))
        assert not any((scales == 1).any() for scales in collect_scales(trainer.model).values()), "a test of scales needs some"


def check_live():
    """Run the checks of `check_live_engine`."""
    current().rank0_engines.run(lambda engines: check_live_engine(current().plan(), engines))


def prove():
    """Return the number of engine tensors that the proof alone finds equal."""
    with current().weight_sync() as sync:
        return sync.prove()


def train(batch):
    """Take one optimizer step."""
    current().trainer.actor.update(own(batch), PolicyLoss(AlgorithmConfig()))


def sync(version, bucket_bytes=MIB, settings=None):
    """Run one whole sync; return its report and the number of chunks."""
    with current().weight_sync(bucket_bytes, settings) as weight_sync:
        return {**asdict(weight_sync.run(version)), "chunks": len(weight_sync.plan.chunks)}


def generate(prompts, tokens=24, sampling=None):
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


def join_logprobs(generations):
    return torch.cat([torch.from_numpy(generation.logprobs_T) for generation in generations])


def make_samples(prompts, generations):
    return [
        TrainingSample(prompt, generation.output_ids_T, kept_tokens=generation.kept_tokens)
        for prompt, generation in zip(prompts, generations, strict=True)
    ]


def generate_seeded(prompts, tokens, engine=None):
    """Return (tokens, log-probs, policy version) of every prompt, sampled with a seed of its own by all engines, or by one."""
    engines = current().engines
    source = engines if engine is None else engines.replicas[engine].engine
    generations = source.generate(prompts, [SamplingParams(1.0, tokens, seed) for seed in range(len(prompts))])
    return [(generation.output_ids_T.tolist(), generation.logprobs_T.tolist(), generation.policy_version) for generation in generations]


_SEEDED = list[tuple[list[int], list[float], int]]


def generate_with_faults(faults, version, prompts, tokens):
    """Run `generate_seeded` with faults; see `support.engine_faults.strike_while`."""
    with current().recovering_sync(_SMALL_BUCKET) as weight_sync:
        return strike_while(lambda: generate_seeded(prompts, tokens), _SEEDED, current().engines, weight_sync, version, faults)


def sync_with_faults(faults, version, settings=None):
    """Run a sync with faults; see `support.engine_faults.sync_through`."""
    with current().recovering_sync(_SMALL_BUCKET, settings) as weight_sync:
        return sync_through(current().rank0_engines, weight_sync, version, faults)


def generate_until_it_fails(prompts):
    """Generate long responses repeatedly. Return the message and the log tail of the RunError that ends it."""
    while True:
        try:
            generate(prompts, tokens=200)
        except RunError as error:
            return str(error), error.log_tail


def take_messages():
    """Return the messages to the user since the last call."""
    messages, current().messages[:] = list(current().messages), []
    return messages


def change_engine(name, row, col):
    """Sync the trainer's weights with one wrong bit at an element of an engine parameter."""
    plan, tensors = current().plan(), dict(current().trainer.collect_named_tensors())
    candidates = ((transfer, transfer.target_rect) for transfer in plan.transfers if transfer.target == name)
    transfer = next(each for each, r in candidates if 0 <= row - r.row < r.rows and 0 <= col - r.col < r.cols)
    wrong = tensors[transfer.source] = tensors[transfer.source].clone()
    place = Rect(transfer.source_rect.row + row - transfer.target_rect.row, transfer.source_rect.col + col - transfer.target_rect.col, 1, 1)
    view_rect(wrong, place).view(torch.uint8).view(-1)[0] ^= 1
    with closing(WeightSync(plan, current().rank0_engines, lambda: tensors, SyncConfig())) as weight_sync:
        weight_sync.run(0)


def generate_and_emulate(prompts, tokens=24):
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

    def __init__(self, problem):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return Message(f"={self.turns}=") if text.endswith(self.stop) else None


def converse(prompts, version, tokens, turns):
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


def compare_graphs(plant=""):
    """Return the lines of differences, of precision and of kernels, the trainer's graph, and the graph of engine rank 0."""
    trainer = current().trainer
    with plant_difference(trainer.model, plant):
        comparison = GraphComparison(read_training_graph(trainer.model).value, tuple(current().engines.read_graph()))
    return comparison.differences + comparison.other_kernels, comparison.training, comparison.rollout[0]
