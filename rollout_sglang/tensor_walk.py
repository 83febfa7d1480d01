"""Search for every tensor that a live model can compute with, whether in a module, a quantization method, a cache or a closure."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_OWN_PACKAGES = ("sglang.", "rollout_sglang.", "megatron_rl.", "parallel.", "types.", "__main__.")
"""Packages whose objects are searched. `types` is for SimpleNamespace."""


class FoundTensor(NamedTuple):
    """A tensor, with the first path that leads to it."""

    path: str  # path such as `model.layers.0.self_attn.w_kc`
    tensor: torch.Tensor
    owner: torch.nn.Module  # the module that holds the tensor


def find_tensors(model: torch.nn.Module) -> Iterator[FoundTensor]:
    """Yield every tensor below `model` once: parameters, buffers, plain attributes, and the contents of quantization methods, other
    engine objects, tensors, containers, partial functions and closures."""
    seen: set[int] = set()
    keep: list[Any] = []  # so that no id is reused
    pending: list[tuple[str, Any, torch.nn.Module]] = [("", model, model)]
    while pending:
        path, value, owner = pending.pop()
        if id(value) in seen or value is None or isinstance(value, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen.add(id(value))
        keep.append(value)
        if isinstance(value, torch.Tensor):
            yield FoundTensor(path, value, owner)
        owner = value if isinstance(value, torch.nn.Module) else owner
        children = [(f"{path}.{name}".removeprefix("."), child, owner) for name, child in _list_children(value)]
        pending.extend(reversed(children))


def _list_children(value: Any) -> list[tuple[str, Any]]:
    """Return the contents of an object by name."""
    if isinstance(value, torch.nn.Module):
        own = {name: child for name, child in vars(value).items() if name not in ("_parameters", "_buffers", "_modules")}
        return list({**value._parameters, **value._buffers, **value._modules, **own}.items())
    if isinstance(value, dict):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(str(index), child) for index, child in enumerate(value)]
    if isinstance(value, functools.partial):
        return [("func", value.func), *((str(index), child) for index, child in enumerate(value.args)), *value.keywords.items()]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]  # not empty
    if isinstance(value, torch.Tensor) or f"{type(value).__module__}.".startswith(_OWN_PACKAGES):
        return [*getattr(value, "__dict__", {}).items(), *_list_slots(value)]
    return []


def _list_slots(value: Any) -> list[tuple[str, Any]]:
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__ if not isinstance(value, torch.Tensor)]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
