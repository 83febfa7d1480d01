"""Makes the policy's checkpoint when it is not there yet: random weights, then supervised training on worked examples.

The same Megatron trainer, layout and precision as the RL run that follows; the result is a Hugging Face checkpoint of FP32 masters
that later runs reuse. Half-made checkpoints do not exist: the folder appears when it is whole.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config, TrainConfig, WarmStartConfig
from megatron_rl.data.arithmetic import generate as generate_problems
from megatron_rl.data.arithmetic import write_demonstration
from megatron_rl.data.byte_tokenizer import load_tokenizer, make_byte_tokenizer
from megatron_rl.data.prompt_template import make_prompt_formatter
from megatron_rl.distributed import is_rank0, run_on_rank0
from megatron_rl.errors import UserError
from megatron_rl.hf.create import make_hf_config, make_random_tensors
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.export import save_hf
from megatron_rl.mcore.load_weights import build_own_shards, collect_named_tensors, load_checkpoint
from megatron_rl.mcore.model import build_model
from megatron_rl.observability import hang_watchdog
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.environments import calculator
from megatron_rl.types import Problem
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

_MASTERS = {"mode": "bf16", "high": "fp32"}
"""Precision of the checkpoint that is written: nothing quantised, FP32."""


def make_warm_start_checkpoint(config: Config, layout: Layout, report: Any) -> None:
    """Writes the checkpoint at `model.path`; collective. `report(text)` is told the progress on rank 0."""
    architecture = config.model.create
    if architecture is None:
        raise UserError("model.path", str(config.model.path), "does not exist", "name an existing checkpoint, or add [model.create]")
    start = Path(run_on_rank0(lambda: str(_random_checkpoint(config))))
    try:
        hf_config = read_config(start)
        contract = PrecisionContract.from_config(config.precision)
        shards = build_own_shards(hf_config, layout)
        model = build_model(hf_config, layout, contract, config.train)
        load_checkpoint(model, start, shards)
        learner = Actor(model, _schedule(config), temperature=1.0)
        _train(config, learner, load_tokenizer(start), report)
        masters = PrecisionContract.from_config(config.precision.model_copy(update=_MASTERS))
        save_hf(config.model.path, collect_named_tensors(model, shards, masters), hf_config, layout, masters, start)
    finally:
        if is_rank0():
            shutil.rmtree(start, ignore_errors=True)


def _random_checkpoint(config: Config) -> Path:
    """A temporary checkpoint with fresh weights and the byte-level tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-random-"))
    make_byte_tokenizer(folder)
    hf_config = make_hf_config(config.model.create, load_tokenizer(folder).eos_token_id, "fp32")  # type: ignore[arg-type]
    tensors = ModelGeometry.from_hf_config(hf_config).tensors().values()
    shapes = {tensor.name: (tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols) for tensor in tensors}
    write_checkpoint(folder, hf_config, make_random_tensors(hf_config, shapes, config.model.warm_start.seed), None)
    return folder


def _schedule(config: Config) -> TrainConfig:
    """The RL run's optimizer with the warm start's learning rate."""
    warm = config.model.warm_start
    return config.train.model_copy(update={"learning_rate": warm.learning_rate, "warmup_steps": min(20, warm.steps)})


def _train(config: Config, learner: Actor, tokenizer: Any, report: Any) -> None:
    warm = config.model.warm_start
    choose, ask = random.Random(warm.seed), make_prompt_formatter(config.data, tokenizer)
    for step in range(1, warm.steps + 1):
        problems = generate_problems(warm.batch_size, config.data.levels, seed=warm.seed * 1_000_003 + step, split="train")
        examples = []
        for problem in problems:
            prompt = tokenizer.encode(ask(problem.prompt), add_special_tokens=False)
            examples.append(make_example(prompt, write_worked_answer(problem, warm, choose), tokenizer))
        metrics = learner.update(examples, _negative_log_likelihood)
        hang_watchdog.enter_phase("the warm start")
        if step % 50 == 0 or step == warm.steps:
            report(f"warm start: step {step}/{warm.steps}, loss {metrics['loss/total']:.3f} nats per token")


def write_worked_answer(problem: Problem, warm: WarmStartConfig, choose: random.Random) -> list[str]:
    """A worked answer: texts of the policy and of the environment in turn."""
    if warm.tool_share and choose.random() < warm.tool_share:
        return calculator.write_demonstration(problem)
    return [write_demonstration(problem, choose, warm.step_by_step_share)]


def make_example(prompt: list[int], parts: list[str], tokenizer: Any) -> TrainingSample:
    """The environment's parts, every second one, are read but not learnt."""
    ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
    ids[-1] = [*ids[-1], tokenizer.eos_token_id]
    sampled = [number % 2 == 0 for number, part in enumerate(ids) for _ in part]
    return TrainingSample(prompt, [one for part in ids for one in part], response_mask=sampled)


def _negative_log_likelihood(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(logprobs * batch.mask).sum(), {}
