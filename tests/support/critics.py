"""A critic on the ranks of a `World`: values, advantages and optimizer steps in any layout, and checkpoints with a value head."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.algorithm.gae import assign_token_advantages
from megatron_rl.algorithm.value_loss import ValueLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.distributed import is_rank0
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.actor import Critic
from megatron_rl.mcore.optim.master_slices import flatten_chained, iter_stepped
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.weights.load_weights import global_parameters
from megatron_rl.precision.graph.graph import PrecisionGraph
from megatron_rl.training.graph_check import read_training_graph
from megatron_rl.training.policies import load_critic
from parallel.layout import Layout
from parallel.model_geometry import VALUE_HEAD
from support.trainer import Trainer, gather, own, start

CLIPRANGE = 0.5


def read_graphs(folder: Path, precision: dict[str, Any], layout: Layout) -> tuple[PrecisionGraph, PrecisionGraph] | None:
    """Return the whole precision graphs of the policy and of the critic, on rank 0."""
    critic, policy = make_critic(folder, precision, {}, layout), Trainer(folder, precision, layout=layout)
    graphs = [read_training_graph(trained) for trained in (policy.model, critic.model)]
    return (graphs[0].value, graphs[1].value) if is_rank0() else None


def make_value_model(folder: Path, policy: Path, seed: int = 0) -> Path:
    """Write a copy of a policy's checkpoint with a value head instead of its output layer."""
    shutil.copytree(policy, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    width = len(tensors["model.norm.weight"])
    tensors[VALUE_HEAD] = 0.05 * torch.randn(1, width, generator=torch.Generator().manual_seed(seed))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_critic(folder: Path, precision: dict[str, Any], train: dict[str, Any], layout: Layout, path: Path | None = None) -> Critic:
    """Return the critic of a run of the policy in `folder`, loaded from `path` if given."""
    start(layout)
    settings = {
        "model": {"path": str(folder)}, "precision": precision, "train": train, "algorithm": {"name": "ppo"},
        "critic": {"learning_rate": 1e-3, **({"path": str(path)} if path else {})},
    }  # fmt: skip
    critic = load_critic(Config.model_validate_json(json.dumps(settings)), layout, read_config(folder))
    assert critic is not None
    return critic


def train_critic(
    folder: Path,
    precision: dict[str, Any],
    train: dict[str, Any],
    batches: list[list[TrainingSample]],
    layout: Layout | None = None,
    path: Path | None = None,
) -> dict[str, Any]:
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


def _copy_masters(critic: Critic) -> dict[str, torch.Tensor]:
    """Return the masters of norms and of the value head, which every tensor-parallel rank holds whole."""
    names = {id(parameter): name for name, parameter in global_parameters(critic.model).items()}
    stepped = (entry for part in flatten_chained(critic.optimizer) for entry in iter_stepped(part))
    gathered = {names[id(parameter)]: master.gather(parameter.shape) for parameter, master in stepped}
    return {name: values for name, values in gathered.items() if "norm" in name or name == "output_layer.weight"}
