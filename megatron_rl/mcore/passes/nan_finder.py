"""Finds the source of inf or NaN: the first module of a forward pass whose output holds one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_rl.distributed import gather_from_ranks
from megatron_rl.mcore.names import ModelChunks, get_model_chunks, global_name


@contextmanager
def record_nonfinite_modules(model: ModelChunks) -> Iterator[list[str]]:
    """Yield a list that forward passes within fill with the names of modules that gave inf or NaN, in the order of computation."""
    names: list[str] = []

    def make_hook(name: str) -> Any:
        def check_output(_: Any, __: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if any(isinstance(x, torch.Tensor) and x.is_floating_point() and not bool(torch.isfinite(x).all()) for x in tensors):
                names.append(name)

        return check_output

    with ExitStack() as hooks:
        for chunk in get_model_chunks(model):
            for name, module in chunk.named_modules():
                if name and not isinstance(module, torch.nn.ModuleList):
                    hooks.enter_context(module.register_forward_hook(make_hook(global_name(chunk, name))))
        yield names


def first_across_ranks(names: list[str]) -> str:
    """Return the first name of the lowest rank that has one, "" without any; collective. Earlier pipeline stages have lower ranks."""
    return next(filter(None, gather_from_ranks(names[0] if names else "")), "")
