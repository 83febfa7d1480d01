"""Reads what a model's operators take and give while it runs: PyTorch hooks on modules that are found by name.

Trainer and engine each list `HookPoint`s that name an operator as the precision graph does, so that what they record can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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
    """The operator whose result this is, in the words of `graph_decoder`; `*` is the layer's number."""
    argument: int | None = None
    """Which positional argument; None for the output, of a tuple its first."""


def attach_hooks(model: torch.nn.Module, points: Sequence[HookPoint], record: RecordFn) -> list[RemovableHandle]:
    """Calls `record` at every point whose module the model has, whenever that module runs. Call `remove()` on what is returned."""
    handles = []
    for point in points:
        pattern = re.compile(re.escape(point.path).replace(r"\*", r"(\d+)"))
        for name, module in model.named_modules():
            if found := pattern.fullmatch(name):
                op = point.op.replace("*", found.group(1)) if found.groups() else point.op
                handles.append(module.register_forward_hook(_hook(op, point.argument, record)))
    return handles


def _hook(op: str, argument: int | None, record: RecordFn) -> Callable[..., None]:
    def hook(_: torch.nn.Module, given: tuple[Any, ...], output: Any) -> None:
        found = given[argument] if argument is not None else output[0] if isinstance(output, tuple) else output
        record(op, found.detach())

    return hook
