"""Reads inputs and outputs of a model's operators while it runs: PyTorch hooks on modules that are found by name.

Trainer and engine name operators as the precision graph does, so that their recordings can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

RecordFn = Callable[[str, torch.Tensor], None]
"""(name of the operator, tensor)."""


@dataclass(frozen=True)
class HookPoint:
    """One tensor at a module's edge."""

    path: str
    """Name of the module; `*` stands for the number of a layer."""
    op: str
    """The operator whose result this is, as `precision.graph.decoder` names it; `*` is the layer's number."""
    argument: int | None = None
    """Index of the positional argument; None for the output, of a tuple its first element."""


_LAYER_POINTS = (  # (module, operator whose result this is, positional argument or None for the output)
    ("qkv", "input_norm", 0),
    ("qkv", "attention.qkv", None),
    ("q_norm", "attention.q_norm", None),
    ("k_norm", "attention.k_norm", None),
    ("q_a_norm", "attention.q_a", 0),
    ("q_a_norm", "attention.q_a_norm", None),
    ("q_b", "attention.q_b", None),
    ("kv_a_norm", "attention.kv_a", 0),
    ("kv_a_norm", "attention.kv_a_norm", None),
    ("attention", "attention.rope.q", 0),
    ("attention", "attention.rope.k", 1),
    ("latent_attention", "attention.rope.q", 0),
    ("latent_attention", "attention.rope.k", 1),
    ("output", "attention.core", 0),
    ("output", "attention.output", None),
    ("gate_up", "post_attention_norm", 0),
    ("router", "post_attention_norm", 0),
    ("gate_up", "mlp.gate_up", None),
    ("down", "mlp.swiglu", 0),
    ("down", "mlp.down", None),
    ("mlp", "mlp", None),
)


def layer_hook_points(prefix: str, paths: Mapping[str, str]) -> tuple[HookPoint, ...]:
    """Return the points of every layer: `prefix` up to the layer, `paths` within it by the names of `_LAYER_POINTS`."""
    return tuple(HookPoint(prefix + paths[module], f"layers.*.{op}", argument) for module, op, argument in _LAYER_POINTS)


def attach_hooks(model: torch.nn.Module, points: Sequence[HookPoint], record: RecordFn) -> list[RemovableHandle]:
    """Call `record` at every point whose module the model has, whenever that module runs. Call `remove()` on the returned handles."""
    handles = []
    for point in points:
        pattern = re.compile(re.escape(point.path).replace(r"\*", r"(\d+)"))
        for name, module in model.named_modules():
            if match := pattern.fullmatch(name):
                op = point.op.replace("*", match.group(1)) if match.groups() else point.op
                handles.append(module.register_forward_hook(_make_hook(op, point.argument, record)))
    return handles


def _make_hook(op: str, argument: int | None, record: RecordFn) -> Callable[..., None]:
    def hook(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = inputs[argument] if argument is not None else output[0] if isinstance(output, tuple) else output
        record(op, tensor.detach())

    return hook
