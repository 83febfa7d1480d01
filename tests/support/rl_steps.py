"""Several real SGLang engines on one device, and RL steps of several precisions in turns, for tests/gpu/test_engines.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config, PrecisionConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.model import freeze, start_megatron, stop_megatron
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.formats import FORMATS
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec
from support.policies import make_actor, make_model
from support.timing import time_call

PHASES = ("rollout", "reference forward", "actor forward", "actor update", "sync", "whole step")


@contextmanager
def start_engines(
    folder: Path,
    architecture: dict[str, Any],
    precisions: Mapping[str, PrecisionConfig],
    rollout: Mapping[str, Any],
    batch_sizes: Sequence[int],
) -> Iterator[dict[str, SGLangEngine]]:
    """Context manager that starts an engine for each precision, on weights that SGLang makes up, and stops all at the end. The engines are
    not ready yet.

    CUDA graphs are captured only for decoding `batch_sizes` sequences; each takes seconds.
    """
    arguments: tuple[str, ...] = ("--load-format", "dummy")
    if torch.cuda.is_available():
        arguments += ("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", *map(str, batch_sizes))
    with ExitStack() as stack:
        engines = {}
        for name, precision in precisions.items():
            model = write_empty_checkpoint(folder / name, architecture, precision)
            sections = {"model": {"path": model}, "precision": precision, "rollout": dict(rollout)}
            config = Config.model_validate({**sections, "placement": {"kind": "disaggregated"}})  # these give no memory back
            engines[name] = SGLangEngine(EngineLaunchSpec(config, model, model, arguments=arguments))
            stack.callback(engines[name].stop)
        yield engines


def write_empty_checkpoint(folder: Path, architecture: dict[str, Any], precision: PrecisionConfig) -> Path:
    """Write a checkpoint's folder without weights; return it."""
    make_byte_tokenizer(folder)
    config = architecture | {"torch_dtype": FORMATS[precision.high].dtype, "eos_token_id": load_tokenizer(folder).eos_token_id}
    write_all_but_weights(folder, describe_weights(config, PrecisionContract.from_config(precision)), None)
    return folder


def make_prompts(count: int, length: int) -> list[list[int]]:
    return [[(7 * index + position) % 250 for position in range(length)] for index in range(count)]


def measure_decoding(engine: Any, batch_size: int, tokens: int, prompt_tokens: int = 32) -> float:
    """Return the tokens per second that an engine decodes with log-probs, after prompts of `prompt_tokens`: a request minus a request
    for a single token. Sequences end early only at the end token."""

    def generate(count: int) -> tuple[int, float]:
        start = time.perf_counter()
        answers = engine.generate(make_prompts(batch_size, prompt_tokens), SamplingParams(temperature=1.0, max_new_tokens=count))
        return sum(len(answer.output_ids_T) for answer in answers), time.perf_counter() - start

    (few, prefill), (many, whole) = generate(1), generate(tokens)
    return (many - few) / max(whole - prefill, 1e-9)


@dataclass(frozen=True)
class StepSize:
    prompts: int
    prompt_tokens: int
    new_tokens: int
    repeat: int


class RlRun:
    """An actor, a reference and a sync of one precision, with their engine."""

    def __init__(self, architecture: dict[str, Any], precision: PrecisionConfig, engine: SGLangEngine, settings: SyncConfig) -> None:
        contract = PrecisionContract.from_config(precision)
        self.actor, self.engine, self.version = make_actor(architecture, precision), engine, 0
        self.reference = Policy(freeze(make_model(architecture, precision)), 1.0, self.actor.micro_batch_tokens)
        shards, geometry = build_rank_shards(architecture, Layout()), ModelGeometry.from_hf_config(architecture)
        plan = SyncPlan.make(geometry, Layout(), (1, 1), contract, settings.chunk_bytes)
        self.sync = WeightSync(plan, Rank0(lambda: engine), lambda: collect_named_tensors(self.actor.model, shards, contract), settings)

    def update_engine(self) -> int:
        """Sync the actor's weights as the next version; return the tensors proved."""
        self.version += 1
        return self.sync.run(self.version).proved

    def step(self, prompts: list[list[int]], new_tokens: int) -> tuple[dict[str, float], float]:
        """Run one RL step with made-up rewards; return the seconds by phase and the mean |log-prob of engine - of trainer|."""
        start = time.perf_counter()
        answers = self.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=new_tokens))
        seconds = {"rollout": time.perf_counter() - start}
        samples = [
            TrainingSample(prompt, answer.output_ids_T, advantage=(-1.0) ** number, rollout_logprobs=torch.from_numpy(answer.logprobs_T))
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

        def score_reference() -> None:
            for sample, logprobs in zip(samples, self.reference.compute_logprobs(samples)[0], strict=True):
                sample.reference_logprobs = logprobs

        def score_actor() -> None:
            for sample, logprobs in zip(samples, self.actor.compute_logprobs(samples)[0], strict=True):
                sample.old_logprobs = logprobs

        seconds["reference forward"] = time_call(score_reference)
        seconds["actor forward"] = time_call(score_actor)
        seconds["actor update"] = time_call(lambda: self.actor.update(samples, PolicyLoss(AlgorithmConfig(kl_coef=0.001))))
        seconds["sync"] = time_call(self.update_engine)
        differences = torch.cat([sample.old_logprobs - sample.rollout_logprobs for sample in samples])
        return seconds | {"whole step": sum(seconds.values())}, float(differences.abs().mean())


def measure_rl_steps(
    folder: Path,
    architecture: dict[str, Any],
    precisions: Mapping[str, PrecisionConfig],
    settings: SyncConfig,
    rollout: Mapping[str, Any],
    size: StepSize,
) -> tuple[dict[str, int], dict[tuple[str, str], float], dict[str, float]]:
    """Return by precision: the tensors proved in the first sync; the median seconds of ("phase", precision); the mean |log-prob of engine
    - of trainer|. The precisions take turns, after one step to warm up; the trainers are built while the engines start."""
    prompts = make_prompts(size.prompts, size.prompt_tokens)
    seconds: dict[tuple[str, str], list[float]] = {}
    distances: dict[str, float] = {}
    with start_engines(folder, architecture, precisions, rollout, (size.prompts,)) as engines:
        start_megatron(Layout(), seed=0)
        try:
            runs = {name: RlRun(architecture, precisions[name], engine, settings) for name, engine in engines.items()}
            for engine in engines.values():
                engine.wait_until_ready()
            proved = {name: run.update_engine() for name, run in runs.items()}
            for turn in range(1 + size.repeat):
                for name, run in runs.items():
                    phases, distances[name] = run.step(prompts, size.new_tokens)
                    if turn:
                        for phase, value in phases.items():
                            seconds.setdefault((phase, name), []).append(value)
            for run in runs.values():
                run.sync.close()
        finally:
            stop_megatron()
    return proved, {case: statistics.median(values) for case, values in seconds.items()}, distances
