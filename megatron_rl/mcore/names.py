"""Global names of parameters: layers and experts are numbered over the whole model, not per pipeline stage or expert-parallel rank."""

from __future__ import annotations

from typing import TypeAlias

from megatron.core.models.gpt import GPTModel

ModelChunks: TypeAlias = GPTModel | list[GPTModel]  # a rank's model, or the list of its virtual pipeline stages


def get_model_chunks(model: ModelChunks) -> list[GPTModel]:
    """Return the virtual pipeline stages of a rank, or its only model, as a list."""
    return model if isinstance(model, list) else [model]


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
