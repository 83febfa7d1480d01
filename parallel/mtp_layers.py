"""Layers for multi-token prediction (MTP), which predict the token after the next one. A checkpoint of DeepSeek-V3 or GLM stores them after
the other layers, one of Qwen as `mtp.*`. Each is a decoder layer whose input is a projection of two normalized vectors: the hidden state of
the layer before, and the embedding of the next token. They use the model's embedding and output layer, of which a checkpoint may hold
copies. Those of Qwen are not trained."""

from collections.abc import Callable
from dataclasses import replace

from parallel.families import load_family
from parallel.layer_weights import pre_norm_layer
from parallel.model_geometry import ModelGeometry
from parallel.shards import HFTensor, Weight, make_vector, make_weight

MEGATRON_PREFIX = "mtp."  # prefix of the weights' names in Megatron


def list_mtp_layer(model: ModelGeometry, number: int) -> tuple[Weight, ...]:
    """Return the weights of the `number`-th MTP layer, without the copies, under the names of Megatron's MTP block. SGLang has none."""
    layer = model.layers + number
    hf, megatron = f"model.layers.{layer}.", f"{MEGATRON_PREFIX}layers.{number}."
    projection = HFTensor(hf + "eh_proj.weight", model.hidden, 2 * model.hidden, "mtp_projection")
    weights = [
        make_vector(hf + "enorm.weight", model.hidden, megatron + "enorm.weight"),
        make_vector(hf + "hnorm.weight", model.hidden, megatron + "hnorm.weight"),
        make_weight(projection, megatron + "eh_proj.weight", "rows"),
    ]
    for weight in pre_norm_layer(model, layer):
        if not weight.megatron.endswith(".kv_scales"):
            name = weight.megatron.replace(f"decoder.layers.{layer}.", megatron + "mtp_model_layer.", 1)
            weights.append(weight._replace(megatron=name))
    weights.append(make_vector(hf + "shared_head.norm.weight", model.hidden, megatron + "final_layernorm.weight"))
    return tuple(weight._replace(sglang="") for weight in weights)


def list_qwen_mtp_layer(model: ModelGeometry, number: int) -> tuple[Weight, ...]:
    """Return the weights of the `number`-th MTP layer of Qwen3-Next and 3.5, which neither Megatron nor SGLang has. All layers share the
    projection and the norms."""
    layer, weights = model.layers + number, list[Weight]()
    for weight in pre_norm_layer(model, layer):
        names = [piece.tensor.name.replace(f"model.layers.{layer}.", f"mtp.layers.{number}.", 1) for piece in weight.pieces]
        tensors = [replace(piece.tensor, name=name) for piece, name in zip(weight.pieces, names, strict=True)]
        weights.append(make_weight(tensors, "", "whole"))
    norms = [make_vector(f"mtp.{name}.weight", model.hidden, "") for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    projection = HFTensor("mtp.fc.weight", model.hidden, 2 * model.hidden, "mtp_projection")
    return (*weights, *norms, make_weight(projection, "", "whole"))


def list_mtp_copies(model: ModelGeometry, number: int) -> dict[str, HFTensor]:
    """Return the copies of other tensors that a checkpoint may hold with the `number`-th MTP layer, by name."""
    copies: Callable[..., dict[str, HFTensor]] | None = getattr(load_family(model.family), "list_mtp_copies", None)
    return copies(model, number) if copies else {}


def can_train_mtp(model: ModelGeometry) -> bool:
    """Return whether the trainer has the MTP layers of the model's family."""
    return hasattr(load_family(model.family), "list_mtp_copies") and model.most_tokens is None


def list_copies(model: ModelGeometry, number: int) -> dict[str, HFTensor]:
    """Return the copies of embedding and output layer that a checkpoint of DeepSeek-V3 or GLM may hold with an MTP layer, by name."""
    hf = f"model.layers.{model.layers + number}."
    copies = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "lm_head"}
    return {hf + name: HFTensor(hf + name, model.vocab, model.hidden, role) for name, role in copies.items()}


def list_mtp_tensors(model: ModelGeometry) -> dict[str, HFTensor]:
    """Return all tensors that a checkpoint may hold of MTP layers, by name."""
    tensors = model.list_kept(range(model.layers, model.layers + model.mtp_layers))
    for number in range(model.mtp_layers):
        weights = load_family(model.family).list_mtp_layer(model, number)
        tensors |= {piece.tensor.name: piece.tensor for weight in weights for piece in weight.pieces}
        tensors |= list_mtp_copies(model, number)
    return tensors
