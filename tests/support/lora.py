"""Adapters on the ranks of a `World`: training, checkpoints, and gradients."""

import torch

from examples.arithmetic.supervised import negative_log_likelihood
from megatron_rl.config.lora import LoraConfig
from megatron_rl.mcore.layers.linear.quantized_linear import list_quantized_layers
from megatron_rl.mcore.names import global_name
from megatron_rl.mcore.weights.adapters import FrozenPolicy, list_adapted_layers
from megatron_rl.mcore.weights.load_weights import global_parameters
from parallel.adapters import NAMES
from support.trainer import Trainer, compute_logprobs, named_masters, own

STEPS = {"learning_rate": 1e-2, "adam_eps": 1e-4}


def train_adapters(folder, precision, lora, batches, layout=None, to=None, train=None):
    """Take a step with adapters on each batch, and write a checkpoint `to`.

    Returns the log-probs of the first batch with the frozen model, with new adapters and with trained ones; the trained adapters; and the
    names of parameters that have a gradient, have a master, or changed.
    """
    trained = Trainer(folder, precision, {**STEPS, **(train or {})}, layout=layout, lora=LoraConfig(**lora))
    actor, model = trained.actor, trained.model
    before = {name: _raw(tensor) for name, tensor in global_parameters(model).items()}
    frozen = FrozenPolicy(model, 1.0, actor.micro_batch_tokens)

    def score(policy):
        return torch.cat(compute_logprobs(policy, batches[0])[0])

    result = {"start": score(actor), "frozen": score(frozen)}
    result["steps"] = [actor.update(own(batch), negative_log_likelihood) for batch in batches]
    result |= {"trained": score(actor), "frozen again": score(frozen)}
    result["changed"] = {name for name, tensor in global_parameters(model).items() if not torch.equal(_raw(tensor), before[name])}
    result["stepped"] = {name for name, *_ in named_masters(actor)}
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


def _raw(tensor):
    return tensor.detach().clone().view(torch.uint8)
