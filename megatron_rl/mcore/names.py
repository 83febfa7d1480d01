"""Global names: Megatron counts layers from 0 in every pipeline stage, and experts on every expert-parallel rank; these names do not."""

from __future__ import annotations

from typing import TypeAlias

from megatron.core.models.gpt import GPTModel

ModelChunks: TypeAlias = GPTModel | list[GPTModel]
"""A rank's model, or its virtual pipeline stages."""


def get_model_chunks(model: ModelChunks) -> list[GPTModel]:
    """Return a rank's virtual pipeline stages, or its only model."""
    return model if isinstance(model, list) else [model]


def global_name(model: GPTModel, name: str) -> str:
    """Return the name of a parameter or module of this rank, with layers and experts numbered over the whole model."""
    parts = name.split(".")
    if parts[1:2] == ["layers"]:
        layer = model.get_submodule(".".join(parts[:3]))
        parts[2] = str(layer.layer_number - 1)
        if "local_experts" in parts:
            expert = parts.index("local_experts") + 1
            mlp = layer.get_submodule(".".join(parts[3 : parts.index("mlp") + 1]))
            parts[expert] = str(mlp.local_expert_indices[int(parts[expert])])
    return ".".join(parts)
