"""Where inf or NaN comes from: the first module of a forward pass whose output holds one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.distributed import gather_from_ranks
from megatron_rl.mcore.names import ModelChunks, get_model_chunks, global_name


@contextmanager
def record_nonfinite_modules(model: ModelChunks) -> Iterator[list[str]]:
    """A list that forward passes within fill with the names of modules that gave inf or NaN, in the order of computation."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def look(_: Any, __: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if any(isinstance(x, torch.Tensor) and x.is_floating_point() and not bool(torch.isfinite(x).all()) for x in parts):
                found.append(name)

        return look

    hooks = [
        module.register_forward_hook(watch(global_name(chunk, name)))
        for chunk in get_model_chunks(model)
        for name, module in chunk.named_modules()
        if name and not isinstance(module, torch.nn.ModuleList)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_across_ranks(found: list[str]) -> str:
    """The first name that the lowest rank with any has, "" where no rank has one; collective. Earlier pipeline stages have lower ranks."""
    return next(filter(None, gather_from_ranks(found[0] if found else "")), "")
