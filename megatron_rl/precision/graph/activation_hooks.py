"""Records inputs and outputs of a running model's operators with PyTorch hooks on modules that are found by name.

Trainer and engine name operators as the precision graph does, so their recordings can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

HookPoint = tuple[str, str, int | None]
"""(module, operator whose result is recorded, index of the positional argument that holds it, or None for the module's output). In both
names `*` stands for the number of a layer. Of an output tuple, the first element is recorded."""
_LAYER_POINTS: tuple[HookPoint, ...] = (
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


def layer_hook_points(prefix: str, modules: Mapping[str, str]) -> list[HookPoint]:
    """Return the points of every layer. `modules` maps the first names in `_LAYER_POINTS` to modules of the layer, whose names start with
    `prefix`."""
    return [(prefix + modules[module], f"layers.*.{op}", argument) for module, op, argument in _LAYER_POINTS]


def attach_hooks(
    model: torch.nn.Module, points: Iterable[HookPoint], record: Callable[[str, torch.Tensor], None]
) -> list[RemovableHandle]:
    """Call `record(operator, tensor)` at every point whose module the model has, whenever that module runs, until `remove()` is called on the
    returned handles."""
    handles = []
    for path, op, argument in points:
        pattern = re.compile(re.escape(path).replace(r"\*", r"(\d+)"))
        for name, module in model.named_modules():
            if match := pattern.fullmatch(name):
                hook = _make_hook(op.replace("*", match.group(1)) if match.groups() else op, argument, record)
                handles.append(module.register_forward_hook(hook))
    return handles


def _make_hook(op: str, argument: int | None, record: Callable[[str, torch.Tensor], None]) -> Callable[..., None]:
    def hook(_: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = inputs[argument] if argument is not None else output[0] if isinstance(output, tuple) else output
        record(op, tensor.detach())

    return hook
