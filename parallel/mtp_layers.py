"""Layers for multi-token prediction (MTP) of DeepSeek-V3 and GLM: each predicts the token after the next one.

They lie behind a model's other layers in its checkpoint. Each is a decoder layer like the last of the others; its input is a projection
of two norms' results, of the state behind the layer before and of the next token's embedding. Embedding and output layer are the model's
own, of which a checkpoint may hold copies.
"""

from __future__ import annotations

from parallel.families import load_family
from parallel.model_geometry import ModelGeometry
from parallel.shards import HFTensor
from parallel.weights import Weight, make_vector, make_weight

MEGATRON_PREFIX = "mtp."
"""Of the names of their weights in Megatron."""


def list_mtp_layer(model: ModelGeometry, number: int) -> tuple[Weight, ...]:
    """Return the weights of the `number`-th of these layers, without the copies. Megatron's names are those of its own MTP block; SGLang's
    model has none of them."""
    layer = model.layers + number
    hf, megatron = f"model.layers.{layer}.", f"{MEGATRON_PREFIX}layers.{number}."
    decoder = [weight for weight in load_family(model.family).list_layer(model, layer) if not weight.megatron.endswith(".kv_scales")]
    projection = HFTensor(hf + "eh_proj.weight", model.hidden, 2 * model.hidden, "mtp_projection")
    weights = (
        make_vector(hf + "enorm.weight", model.hidden, megatron + "enorm.weight"),
        make_vector(hf + "hnorm.weight", model.hidden, megatron + "hnorm.weight"),
        make_weight(projection, megatron + "eh_proj.weight", "rows"),
        *(_rename(weight, f"decoder.layers.{layer}.", megatron + "transformer_layer.") for weight in decoder),
        make_vector(hf + "shared_head.norm.weight", model.hidden, megatron + "final_layernorm.weight"),
    )
    return tuple(weight._replace(sglang="") for weight in weights)


def _rename(weight: Weight, old: str, new: str) -> Weight:
    return weight._replace(megatron=weight.megatron.replace(old, new, 1))


def list_copies(model: ModelGeometry, number: int) -> dict[str, HFTensor]:
    """Return the copies of embedding and output layer that a checkpoint may hold with the `number`-th of these layers, by name."""
    hf = f"model.layers.{model.layers + number}."
    copies = (
        HFTensor(hf + "embed_tokens.weight", model.vocab, model.hidden, "embedding"),
        HFTensor(hf + "shared_head.head.weight", model.vocab, model.hidden, "lm_head"),
    )
    return {tensor.name: tensor for tensor in copies}


def list_mtp_tensors(model: ModelGeometry) -> dict[str, HFTensor]:
    """Return all tensors that a checkpoint may hold of these layers, by name."""
    tensors: dict[str, HFTensor] = {}
    for number in range(model.mtp_layers):
        tensors |= {piece.tensor.name: piece.tensor for weight in list_mtp_layer(model, number) for piece in weight.pieces}
        tensors |= list_copies(model, number)
    return tensors
