"""The warm start: makes the policy's checkpoint if there is none, from random weights by supervised training on worked examples.

It uses the same Megatron trainer, layout and precision as the RL run that follows. The result is a Hugging Face checkpoint of FP32 masters
that later runs reuse; its folder appears when it is whole.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config, WarmStartConfig
from megatron_rl.data.arithmetic import generate as generate_problems
from megatron_rl.data.arithmetic import write_demonstration
from megatron_rl.data.byte_tokenizer import load_tokenizer, make_byte_tokenizer
from megatron_rl.data.prompt_template import make_prompt_formatter
from megatron_rl.distributed import is_rank0, run_on_rank0
from megatron_rl.errors import UserError
from megatron_rl.hf.create import make_hf_config, make_random_tensors
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.mcore.actor import TOTAL_LOSS, Actor
from megatron_rl.mcore.export import save_hf
from megatron_rl.mcore.load_weights import build_rank_shards, collect_named_tensors, load_checkpoint
from megatron_rl.mcore.model import build_model
from megatron_rl.observability import hang_watchdog
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.environments import calculator
from megatron_rl.types import Problem
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

_MASTERS = {"mode": "bf16", "high": "fp32"}
"""Precision of the checkpoint that is written: nothing quantized, FP32."""


def make_warm_start_checkpoint(config: Config, layout: Layout, notify: Callable[[str], None]) -> None:
    """Write the checkpoint at `model.path`. Collective; `notify` gets the progress."""
    if config.model.create is None:
        raise UserError("model.path", str(config.model.path), "does not exist", "name an existing checkpoint, or add [model.create]")
    start = Path(run_on_rank0(lambda: str(_make_random_checkpoint(config))))
    try:
        hf_config = read_config(start)
        contract = PrecisionContract.from_config(config.precision)
        shards = build_rank_shards(hf_config, layout)
        model = build_model(hf_config, layout, contract, config.train)
        load_checkpoint(model, start, shards)
        warm = config.model.warm_start
        settings = config.train.model_copy(update={"learning_rate": warm.learning_rate, "warmup_steps": min(20, warm.steps)})
        _train(config, Actor(model, settings, temperature=1.0), load_tokenizer(start), notify)
        masters = PrecisionContract.from_config(config.precision.model_copy(update=_MASTERS))
        save_hf(config.model.path, collect_named_tensors(model, shards, masters), hf_config, layout, masters, start)
    finally:
        if is_rank0():
            shutil.rmtree(start, ignore_errors=True)


def _make_random_checkpoint(config: Config) -> Path:
    """Write a temporary checkpoint with random weights and the byte-level tokenizer; return its folder."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-random-"))
    make_byte_tokenizer(folder)
    hf_config = make_hf_config(config.model.create, load_tokenizer(folder).eos_token_id, "fp32")  # type: ignore[arg-type]
    tensors = ModelGeometry.from_hf_config(hf_config).tensors().values()
    shapes = {tensor.name: (tensor.rows,) if tensor.vector else (tensor.rows, tensor.cols) for tensor in tensors}
    write_checkpoint(folder, hf_config, make_random_tensors(hf_config, shapes, config.model.warm_start.seed), None)
    return folder


def _train(config: Config, actor: Actor, tokenizer: Any, notify: Callable[[str], None]) -> None:
    warm = config.model.warm_start
    rng, format_prompt = random.Random(warm.seed), make_prompt_formatter(config.data, tokenizer)
    for step in range(1, warm.steps + 1):
        problems = generate_problems(warm.batch_size, config.data.levels, seed=warm.seed * 1_000_003 + step, split="train")
        examples = []
        for problem in problems:
            prompt = tokenizer.encode(format_prompt(problem.prompt), add_special_tokens=False)
            examples.append(make_example(prompt, write_worked_answer(problem, warm, rng), tokenizer))
        metrics = actor.update(examples, negative_log_likelihood)
        hang_watchdog.enter_phase("the warm start")
        if step % 50 == 0 or step == warm.steps:
            notify(f"warm start: step {step}/{warm.steps}, loss {metrics[TOTAL_LOSS]:.3f} nats per token")


def write_worked_answer(problem: Problem, warm: WarmStartConfig, rng: random.Random) -> list[str]:
    """Return a worked answer: texts of the policy and of the environment in turn."""
    if warm.tool_share and rng.random() < warm.tool_share:
        return calculator.write_demonstration(problem)
    return [write_demonstration(problem, rng, warm.step_by_step_share)]


def make_example(prompt: list[int], turns: list[str], tokenizer: Any) -> TrainingSample:
    """Join the turns; the environment's, every second one, are read but not learnt."""
    ids = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
    ids[-1] = [*ids[-1], tokenizer.eos_token_id]
    response_mask = [number % 2 == 0 for number, turn_ids in enumerate(ids) for _ in turn_ids]
    return TrainingSample(prompt, [token for turn_ids in ids for token in turn_ids], response_mask=response_mask)


def negative_log_likelihood(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed loss of supervised training, and no metrics."""
    return -(logprobs * batch.mask).sum(), {}
