"""Names over the whole model: Megatron counts layers anew in every pipeline stage, and experts on every expert-parallel rank."""

from __future__ import annotations

from typing import TypeAlias

from megatron.core.models.gpt import GPTModel

ModelChunks: TypeAlias = GPTModel | list[GPTModel]
"""A rank's model, or its virtual pipeline stages."""


def get_model_chunks(model: ModelChunks) -> list[GPTModel]:
    """A rank's virtual pipeline stages; one, where it has none."""
    return model if isinstance(model, list) else [model]


def global_name(model: GPTModel, name: str) -> str:
    """`name` of a parameter or module of this rank, told for the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        layer = model.decoder.layers[int(parts[2])]
        parts[2] = str(layer.layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(layer.mlp.local_expert_indices[int(parts[at])])
    return ".".join(parts)
