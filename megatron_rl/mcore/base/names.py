"""The modules of a rank's model chunks, and their global names: layers and experts are numbered over the whole model."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from megatron.core.models.gpt import GPTModel

ModelChunks: TypeAlias = GPTModel | list[GPTModel]  # a rank's model, or the list of its virtual pipeline stages


def get_model_chunks(model: ModelChunks) -> list[GPTModel]:
    """Return the virtual pipeline stages of a rank, or its only model, as a list."""
    return model if isinstance(model, list) else [model]


def freeze(model: ModelChunks) -> ModelChunks:
    """Disable the gradients of all parameters; return the model."""
    for chunk in get_model_chunks(model):
        chunk.requires_grad_(False)
    return model


def iter_modules(model: ModelChunks, kind: type = torch.nn.Module) -> Iterator[tuple[GPTModel, str, Any]]:
    """Yield (chunk, name, module) of all modules of class `kind`."""
    for chunk in get_model_chunks(model):
        yield from ((chunk, name, module) for name, module in chunk.named_modules() if isinstance(module, kind))


@contextmanager
def override(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Context manager that sets an attribute of each object and restores it on exit."""
    saved = [(each, getattr(each, name)) for each in objects]
    for each, _ in saved:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, before in saved:
            setattr(each, name, before)


def global_name(model: GPTModel, name: str) -> str:
    """Return the global name of a parameter or module of this rank."""
    parts = name.split(".")
    if parts[1:2] == ["layers"]:
        layer = model.get_submodule(".".join(parts[:3]))
        parts[2] = str(layer.layer_number - 1)
        if "local_experts" in parts:
            expert = parts.index("local_experts") + 1
            mlp = layer.get_submodule(".".join(parts[3 : parts.index("mlp") + 1]))
            parts[expert] = str(mlp.local_expert_indices[int(parts[expert])])
    return ".".join(parts)
