"""Gradients of a whole model that keeps its activations or computes them anew, run in the ranks of a `World`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.mcore.layers.fp8_linear import find_fp8_layers
from support.trainer import Trainer


def gradients(folder: Path, precision: dict[str, Any], recompute: str) -> dict[str, torch.Tensor]:
    """This rank's gradients of one made-up loss under sequence parallelism; FP8 layers add theirs to a gradient buffer."""
    model = Trainer(folder, precision, {"recompute": recompute}).actor.model
    assert model.config.sequence_parallel
    for layer in find_fp8_layers(model).values():
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    runs: list[int] = []
    first = model.decoder.layers[0].mlp.linear_fc1
    first.register_forward_hook(lambda *_: runs.append(1))
    tokens = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(3))
    model.train()
    logits = model(tokens, torch.arange(48).expand(4, 48).contiguous(), None)
    logits.float().square().mean().backward()
    assert len(runs) == (1 if recompute == "none" else 2), f"the layer ran {len(runs)} times"
    return {name: getattr(p, "main_grad", p.grad).clone() for name, p in model.named_parameters()}
