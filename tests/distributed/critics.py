"""A critic on the ranks of a `World`: values, advantages and optimizer steps in any layout, and checkpoints with a value head."""

import json
import shutil
from functools import partial

import torch
from safetensors.torch import load_file, save_file
from support.trainer import Trainer, gather, named_masters, own, start

from megatron_rl.algorithm.gae import assign_token_advantages
from megatron_rl.algorithm.value_loss import ValueLoss
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.diagnosis.graph_check import read_training_graph
from megatron_rl.distributed import is_rank0
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.passes import reduce
from megatron_rl.training.policies import load_critic
from parallel.layout import Layout
from parallel.model_geometry import VALUE_HEAD

CLIPRANGE = 0.5


def read_graphs(folder, precision, layout):
    """Return the whole precision graphs of the policy and of the critic, on rank 0."""
    critic, policy = make_critic(folder, precision, {}, layout), Trainer(folder, precision, layout=layout)
    graphs = [read_training_graph(trained) for trained in (policy.model, critic.model)]
    return (graphs[0].value, graphs[1].value) if is_rank0() else None


def make_value_model(folder, policy, seed=0):
    """Write a copy of a policy's checkpoint with a value head instead of its output layer."""
    shutil.copytree(policy, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    width = len(tensors["model.norm.weight"])
    tensors[VALUE_HEAD] = 0.05 * torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_critic(folder, precision, train, layout, path=None):
    """Return the critic of a run of the policy in `folder`, loaded from `path` if given."""
    start(layout)
    settings = {
        "model": {"path": str(folder)}, "precision": precision, "train": train, "algorithm": {"name": "ppo"},
        "critic": {"learning_rate": 1e-3, **({"path": str(path)} if path else {})},
    }  # fmt: skip
    critic = load_critic(Config.model_validate_json(json.dumps(settings)), layout, read_config(folder))
    assert critic is not None
    return critic


def train_critic(folder, precision, train, batches, layout=None, path=None):
    """Take a step on every batch. Return values, advantages, returns and their metrics for the first batch before the steps, and its
    values after them."""
    critic = make_critic(folder, precision, train, layout or Layout(), path)
    config, steps, first = AlgorithmConfig(name="ppo", gamma=0.99, lam=0.95), [], {}
    for batch in batches:
        share = own(batch)
        for sample, values in zip(share, critic.compute_values(share), strict=True):
            sample.values = values
        numbers = [sample.number for sample in share]
        metrics = assign_token_advantages(share, config, partial(reduce.sum_samples, numbers=numbers, count=len(batch)))
        if not first:
            columns = {name: gather(share, [getattr(s, name) for s in share]) for name in ("values", "token_advantages", "returns")}
            first = {"metrics": metrics, **{name: torch.cat(parts) for name, parts in columns.items()}}
        steps.append(critic.update(share, ValueLoss(CLIPRANGE)))
    share = own(batches[0])
    after = gather(share, critic.compute_values(share))
    return {**first, "steps": steps, "after": torch.cat(after), "masters": _copy_masters(critic)}


def _copy_masters(critic):
    """Return the masters of norms and of the value head, which every tensor-parallel rank holds whole."""
    gathered = {name: master.gather(parameter.shape) for name, parameter, master in named_masters(critic)}
    return {name: values for name, values in gathered.items() if "norm" in name or name == "output_layer.weight"}
