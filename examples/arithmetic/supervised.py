"""Supervised training on worked examples of the arithmetic task, with the trainer, layout and precision of a run."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from examples.arithmetic import calculator, tool_agent
from examples.arithmetic.config import DemoConfig, WarmStartConfig
from examples.arithmetic.task import Arithmetic, write_demonstration
from megatron_rl.batch.micro_batch import MicroBatch
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.data.prompt_template import make_prompt_formatter
from megatron_rl.distributed import is_rank0, run_on_rank0
from megatron_rl.hf.files import read_config
from megatron_rl.hf.prompt_tokens import encode_prompt
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.mcore.actor import TOTAL_LOSS, Actor
from megatron_rl.mcore.checkpoint.checkpointing import CheckpointWriter
from megatron_rl.mcore.checkpoint.export import convert
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.weights.load_weights import build_rank_shards, load_checkpoint
from megatron_rl.observability.console import format_left
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.threads import count_threads
from megatron_rl.preflight import check_on_rank_0
from megatron_rl.types import Problem
from parallel.layout import Layout
from parallel.model_geometry import with_trained_mtp


def train_and_save(config: DemoConfig, layout: Layout, levels: tuple[int, ...], target: Path, notify: Callable[[str], None]) -> None:
    """Train the checkpoint at `model.path` on problems of `levels` and write the result to `target`. Collective.

    Raise UserError if a check that only rank 0 makes fails.
    """
    start_megatron(layout, config.train.seed)
    try:
        run_on_rank0(lambda: check_on_rank_0(config))
        start = config.model.path
        if not torch.cuda.is_available():
            torch.set_num_threads(count_threads(layout.world_size))
        hf_config = read_config(start)
        trained_config = with_trained_mtp(hf_config) if config.train.mtp_loss_scaling_factor else hf_config
        model = build_model(trained_config, layout, PrecisionContract.from_config(config.precision), config.train)
        load_checkpoint(model, start, build_rank_shards(trained_config, layout))
        warm = config.warm_start
        actor = Actor(model, config.train, temperature=1.0)
        actor.learning_rate = lambda done: warm.learning_rate * min(1, (done + 1) / min(20, warm.steps)) * (1 - done / warm.steps)
        actor.response = None  # nobody reads its metrics here
        _train(config, actor, load_tokenizer(start), levels, notify)
        trained = target.with_name(f".{target.name}.trained")
        state = {"step": warm.steps, "precision": config.precision.model_dump(mode="json")}
        CheckpointWriter(trained, model, hf_config, start, state).finish()
        try:
            convert(trained, target, {"mode": "bf16", "high": warm.saved_as})  # nothing is quantized
        finally:
            if is_rank0():
                shutil.rmtree(trained)
    finally:
        stop_megatron()


def _train(config: DemoConfig, actor: Actor, tokenizer: Any, levels: tuple[int, ...], notify: Callable[[str], None]) -> None:
    warm = config.warm_start
    rng, format_prompt = random.Random(warm.seed), make_prompt_formatter(config.data, tokenizer)
    demonstrate = calculator.write_demonstration if config.agent is None else tool_agent.write_demonstration
    start = time.monotonic()
    for step in range(1, warm.steps + 1):
        task = Arithmetic(warm.seed * 1_000_003 + step, levels)
        examples = []
        for problem in map(task.train_problem, range(warm.batch_size)):
            text = format_prompt(problem.prompt) if config.agent is None else tool_agent.write_question(problem)
            prompt = encode_prompt(tokenizer, text, chat=config.data.chat or config.agent is not None)
            examples.append(make_example(prompt, write_worked_answer(problem, warm, rng, demonstrate), tokenizer))
        metrics = actor.update(select_own(examples), negative_log_likelihood)
        if step % 50 == 0 or step == warm.steps:
            left = format_left((time.monotonic() - start) / step * (warm.steps - step))
            notify(f"warm start: step {step}/{warm.steps}, loss {metrics[TOTAL_LOSS]:.3f} nats per token, {left} left")


def write_worked_answer(
    problem: Problem,
    warm: WarmStartConfig,
    rng: random.Random,
    demonstrate: Callable[[Problem], list[str]] = calculator.write_demonstration,
) -> list[str]:
    """Return a worked answer as alternating texts of the policy and of its tool. `demonstrate` writes the examples that call the tool."""
    if warm.tool_share and rng.random() < warm.tool_share:
        return demonstrate(problem)
    return [write_demonstration(problem, rng, warm.step_by_step_share)]


def make_example(prompt: list[int], turns: list[str], tokenizer: Any) -> TrainingSample:
    """Join the turns. Every second turn is the tool's and is masked in the loss."""
    ids = [tokenizer.encode(turn, add_special_tokens=False) for turn in turns]
    ids[-1] = [*ids[-1], tokenizer.eos_token_id]
    mask = [number % 2 == 0 for number, turn_ids in enumerate(ids) for _ in turn_ids]
    response = torch.tensor([token for turn_ids in ids for token in turn_ids])
    return TrainingSample(torch.tensor(prompt), response, response_mask=torch.tensor(mask))


def negative_log_likelihood(logprobs: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed supervised loss and no metrics."""
    return -(logprobs * batch.mask).sum(), {}
