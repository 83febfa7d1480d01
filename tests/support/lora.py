"""Adapters on the ranks of a `World`: training, checkpoints, and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.lora import LoraConfig
from megatron_rl.mcore.checkpoint.checkpointing import load_run_checkpoint
from megatron_rl.mcore.checkpoint.run_weights import read_state
from megatron_rl.mcore.layers.linear.quantized_linear import list_quantized_layers
from megatron_rl.mcore.names import global_name
from megatron_rl.mcore.optim.master_slices import flatten_chained, iter_stepped
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.weights.adapter_export import export_adapters
from megatron_rl.mcore.weights.adapters import FrozenPolicy, list_adapted_layers
from megatron_rl.mcore.weights.load_weights import global_parameters
from parallel.adapters import NAMES
from parallel.layout import Layout
from support.trainer import Trainer, compute_logprobs, own

STEPS = {"learning_rate": 1e-2, "adam_eps": 1e-4}


def train_adapters(
    folder: Path,
    precision: dict[str, Any],
    lora: dict[str, Any],
    batches: list[list[TrainingSample]],
    layout: Layout | None = None,
    to: Path | None = None,
    train: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Take a step with adapters on each batch, and write a checkpoint `to`.

    Returns the log-probs of the first batch with the frozen model, with new adapters and with trained ones; the trained adapters; and the
    names of parameters that have a gradient, have a master, or changed.
    """
    trained = Trainer(folder, precision, {**STEPS, **(train or {})}, layout=layout, lora=LoraConfig(**lora))
    actor, model = trained.actor, trained.model
    before = {name: _raw(tensor) for name, tensor in global_parameters(model).items()}
    frozen = FrozenPolicy(model, 1.0, actor.micro_batch_tokens)

    def score(policy: Any) -> torch.Tensor:
        return torch.cat(compute_logprobs(policy, batches[0])[0])

    result: dict[str, Any] = {"start": score(actor), "frozen": score(frozen)}
    result["steps"] = [actor.update(own(batch), negative_log_likelihood) for batch in batches]
    result |= {"trained": score(actor), "frozen again": score(frozen)}
    names = {name for name, tensor in global_parameters(model).items() if not torch.equal(_raw(tensor), before[name])}
    stepped = {id(parameter) for part in flatten_chained(actor.optimizer) for parameter, _ in iter_stepped(part)}
    result["changed"] = names
    result["stepped"] = {name for name, parameter in global_parameters(model).items() if id(parameter) in stepped}
    result["gradients"] = {name for name, parameter in global_parameters(model).items() if hasattr(parameter, "main_grad")}
    result["masters"] = [layer for layer in list_quantized_layers(model) if layer.master is not None]
    result["adapters"] = {
        f"{global_name(chunk, name)}.{each}": getattr(layer, each).detach().clone()
        for chunk, name, layer in list_adapted_layers(model)
        for each in NAMES
    }
    if to is not None:
        trained.save(to, len(batches), with_optimizer=True, lora=lora, base=str(folder))
    return result


def score_checkpoint(
    folder: Path, precision: dict[str, Any], lora: dict[str, Any], batch: list[TrainingSample], layout: Layout, checkpoint: Path
) -> torch.Tensor:
    """Return the log-probs of a batch with a checkpoint's adapters, whatever layout wrote it."""
    loaded = Trainer(folder, precision, layout=layout, lora=LoraConfig(**lora))
    load_run_checkpoint(checkpoint, loaded.model, loaded.actor.optimizer, read_state(checkpoint, of_adapters=True)[0], same_layout=False)
    return torch.cat(compute_logprobs(loaded.actor, batch)[0])


def export(checkpoint: Path, to: Path) -> None:
    """Export adapters in a process of a world."""
    export_adapters(checkpoint, to)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().view(torch.uint8)


def measure_adapter_gradient(
    folder: Path, precision: dict[str, Any], lora: dict[str, Any], batch: list[TrainingSample]
) -> tuple[float, float]:
    """Return |g|^2 of the adapters' gradient of the mean loss, and the slope of the loss along g by finite differences. B is nonzero."""
    trained = Trainer(folder, precision, {"learning_rate": 1e-12, "clip_grad": 0.0}, lora=LoraConfig(**lora))
    parameters = [getattr(layer, each) for _, _, layer in list_adapted_layers(trained.model) for each in NAMES]
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    own, actor = select_own(batch), trained.actor
    actor.update(own, negative_log_likelihood)
    gradients = [parameter.main_grad.clone() for parameter in parameters]
    square = sum(float(gradient.double().square().sum()) for gradient in gradients)

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += step * gradient
            loss = -torch.cat(actor.compute_logprobs(own)[0]).double().mean().item()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= step * gradient
        return loss

    step = 1e-2 / square**0.5
    return square, (loss_at(step) - loss_at(-step)) / (2 * step)
