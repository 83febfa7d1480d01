"""Part `speed_step`: whole RL steps in `fp8_unified` and in BF16, in turns: generate, log-probs of reference and actor, update, sync.

As many layers of an 8B model as fit with both precisions' actors, references and engines on one device. Real engines, the real sync with
its proof; rewards are made up, and nothing is logged. A model of few layers spends more of a step on what FP8 does not speed up.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu_parts.backends import usable
from gpu_parts.found import Machine, find
from gpu_parts.one_layer import actor, model
from gpu_parts.rows import Rows, run_part
from gpu_parts.side_by_side import started, those_up
from gpu_parts.sizes import ACTOR, ENGINE, LAYERS_OF_8B, REFERENCE, SIZES, layers_that_fit, stack
from gpu_parts.speed_layer import timed
from gpu_parts.targets import TO_BEAT, add
from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import ArchitectureConfig, PrecisionConfig
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.hf.create import make_hf_config
from megatron_rl.mcore.actor import Policy
from megatron_rl.mcore.load_weights import build_rank_shards, collect_named_tensors
from megatron_rl.mcore.model import freeze, start_megatron, stop_megatron
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.types import SamplingParams
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from rollout_sglang.engine import SGLangEngine

_TOKENS = 8192  # of a micro-batch, as by default
_PROMPTS, _PROMPT, _NEW_TOKENS = 64, 64, 192
_ROLLOUT = {"max_running_requests": _PROMPTS, "max_total_tokens": 32768, "start_timeout": 90.0, "request_timeout": 90.0}
_ORDER = ("rollout", "reference forward", "actor forward", "actor update", "sync", "whole step")


def part(rows: Rows) -> None:
    machine = find()
    backend = next(iter(usable(machine, rows)), "emulated")
    precisions = {"bf16": PrecisionConfig(mode="bf16"), "fp8": PrecisionConfig.model_validate({"backend": backend})}
    layers = layers_here(machine)
    rows.add("layers", f"{layers} of {LAYERS_OF_8B} fit on {machine.memory_gib} GiB; back end {backend}")
    transport = SyncConfig(transport="cuda_ipc", proof="streamed", timeout=30.0)
    with tempfile.TemporaryDirectory() as folder:
        run(rows, Path(folder), stack("8B", layers), precisions, transport, _ROLLOUT, (_PROMPTS, _PROMPT, _NEW_TOKENS), repeat=3)


def layers_here(machine: Machine) -> int:
    held = sum(ACTOR + REFERENCE[name] + ENGINE[name] for name in ("bf16", "fp8"))
    return layers_that_fit(SIZES["8B"], machine.memory_gib or 0.0, held, _TOKENS, LAYERS_OF_8B)


def run(
    rows: Rows,
    folder: Path,
    architecture: ArchitectureConfig,
    precisions: Mapping[str, PrecisionConfig],
    settings: SyncConfig,
    rollout: Mapping[str, Any],
    size: tuple[int, int, int],
    repeat: int,
) -> None:
    """`size`: prompts, tokens of each, most new tokens. The trainers are built while the engines start."""
    with started(folder, architecture, precisions, rollout, batches=(size[0],)) as engines:
        start_megatron(Layout(), seed=0)
        try:
            runs = {name: OneRun(architecture, precisions[name], engine, settings) for name, engine in engines.items()}
            measure(rows, {name: runs[name] for name in those_up(rows, engines)}, size, repeat)
        finally:
            stop_megatron()


class OneRun:
    """Actor, reference and sync of one precision, in front of its engine."""

    def __init__(self, architecture: ArchitectureConfig, precision: PrecisionConfig, engine: SGLangEngine, settings: SyncConfig) -> None:
        hf_config, contract = make_hf_config(architecture, 0, precision.high), PrecisionContract.from_config(precision)
        self.actor, self.engine, self.version = actor(architecture, precision), engine, 0
        self.reference = Policy(freeze(model(architecture, precision)), 1.0, self.actor.micro_batch_tokens)
        shards, geometry = build_rank_shards(hf_config, Layout()), ModelGeometry.from_hf_config(hf_config)
        plan = SyncPlan.make(geometry, Layout(), (1, 1), contract, settings.chunk_bytes)
        self.sync = WeightSync(plan, engine, lambda: collect_named_tensors(self.actor.model, shards, contract), settings)

    def update_engine(self) -> int:
        """The engine serves the actor's weights, as the next version; returns the tensors proved."""
        self.version += 1
        return self.sync.run(self.version).proved

    def step(self, prompts: list[list[int]], new_tokens: int) -> tuple[dict[str, float], float]:
        """One RL step: (seconds by phase, mean |log-prob of engine - of trainer|)."""
        start = time.perf_counter()
        answers = self.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=new_tokens))
        seconds = {"rollout": time.perf_counter() - start}
        batch = [
            TrainingSample(prompt, answer.output_ids_T, advantage=(-1.0) ** number, rollout_logprobs=torch.tensor(answer.logprobs_T))
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        found: dict[str, list[torch.Tensor]] = {}

        def ask(name: str, policy: Policy) -> None:
            found[name] = policy.compute_logprobs(batch)[0]

        phases: dict[str, Callable[[], object]] = {
            "reference forward": partial(ask, "reference", self.reference),
            "actor forward": partial(ask, "actor", self.actor),
            "actor update": lambda: self.actor.update(batch, PolicyLoss(AlgorithmConfig(kl_coef=0.001))),
            "sync": self.update_engine,
        }
        for name, phase in phases.items():
            if name == "actor update":
                for sequence, old, reference in zip(batch, found["actor"], found["reference"], strict=True):
                    sequence.old_logprobs, sequence.reference_logprobs = old, reference
            seconds[name] = timed(phase)
        distance = torch.cat(found["actor"]) - torch.cat([sequence.rollout_logprobs for sequence in batch])
        return seconds | {"whole step": sum(seconds.values())}, float(distance.abs().mean())


def measure(rows: Rows, runs: Mapping[str, OneRun], size: tuple[int, int, int], repeat: int) -> None:
    """Medians of `repeat` steps after one to warm up; the precisions take turns. What breaks in one leaves the others their rows."""
    count, length, new_tokens = size
    prompts = [[(7 * index + place) % 250 for place in range(length)] for index in range(count)]
    seconds: dict[str, dict[str, list[float]]] = {}
    distances: dict[str, float] = {}
    for name, one in runs.items():
        with rows.guarded(f"first sync, {name}"):
            proved = one.update_engine()
            rows.add(f"first sync, {name}", f"{proved} tensors proved", proved > 0)
            seconds[name] = {phase: [] for phase in _ORDER}
    for turn in range(repeat + 1):
        for name in list(seconds):
            with rows.guarded(f"step {turn + 1}, {name}"):
                found, distances[name] = runs[name].step(prompts, new_tokens)
                if turn:
                    for phase, took in found.items():
                        seconds[name][phase].append(took)
    for one in runs.values():
        one.sync.close()
    tell(rows, {name: {phase: statistics.median(took) for phase, took in found.items() if took} for name, found in seconds.items()})
    for name, distance in distances.items():
        rows.add(f"engine against trainer, {name}", f"|dlogp| mean {distance:.3g}", None, abs_mean=distance)


def tell(rows: Rows, seconds: Mapping[str, Mapping[str, float]]) -> None:
    """A row for each phase and precision; ratios to BF16 where BF16 ran."""
    for phase in _ORDER:
        for name, found in seconds.items():
            if phase not in found:
                continue
            took, told = found[phase], f"{found[phase] * 1e3:.1f} ms"
            if name != "bf16" and phase in seconds.get("bf16", {}):
                ratio = seconds["bf16"][phase] / took
                told = f"{told}, {ratio:.2f}x of BF16"
                if phase in TO_BEAT and phase != "sync":
                    add(rows, phase, f"RL step: {phase}, {name}", told, ratio, seconds=took, of_bf16=ratio)
                    continue
            rows.add(f"RL step: {phase}, {name}", told, None, seconds=took)


if __name__ == "__main__":
    run_part(part)
