"""Gradients of a whole model with Megatron's options set by a test, run in the ranks of a `World`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_rl.mcore import model as models
from megatron_rl.mcore.linear import fp8_layers
from support.trainer import Trainer

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def gradients(folder: Path, precision: dict[str, Any], recompute: bool) -> dict[str, torch.Tensor]:
    """This rank's gradients of one made-up loss under sequence parallelism; FP8 layers add theirs to a gradient buffer."""
    options = {"sequence_parallel": True, **(FULL if recompute else {})}
    with mock.patch.object(models, "PolicyConfig", functools.partial(models.PolicyConfig, **options)):
        model = Trainer(folder, precision).actor.model
    assert model.config.sequence_parallel and (model.config.recompute_granularity == "full") == recompute
    for layer in fp8_layers(model).values():
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    runs: list[int] = []
    first = model.decoder.layers[0].mlp.linear_fc1
    first.register_forward_hook(lambda *_: runs.append(1))
    tokens = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(3))
    model.train()
    logits = model(tokens, torch.arange(48).expand(4, 48).contiguous(), None)
    logits.float().square().mean().backward()
    assert len(runs) == (2 if recompute else 1), f"the layer ran {len(runs)} times"
    return {name: getattr(p, "main_grad", p.grad).clone() for name, p in model.named_parameters()}
