"""Differences of precision planted into a live Megatron model, which the comparison of graphs must find."""

from contextlib import contextmanager

import pytest
import torch

from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from parallel.formats import FP8


@contextmanager
def plant_difference(model, plant):
    """Context manager that changes one thing of a live model; "" changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if plant:
            _PLANTS[plant](patch.setattr, model, model.decoder.layers[-1])
        yield


def _activation_scales(change, model, _):
    for layer in find_quantized_layers(model).values():
        change(layer, "format", FP8.with_scales("fp32"))


def _high_precision_layer(change, _, last):
    """Remove the blocks of the last layer's output projection, so that the engine quantizes one layer more than the trainer."""
    layer = last.self_attention.linear_proj
    change(layer, "__class__", type(type(layer).__name__, (type(layer),), {"blocks": None, "__module__": type(layer).__module__}))


def _fp8_head(change, model, last):
    """Quantize the output layer, so that the trainer quantizes one layer more than the engine."""
    head, example = model.output_layer, last.mlp.linear_fc2
    rows, cols = head.weight.shape
    data, scale = head.weight.detach().to(torch.float8_e4m3fn), example.blocks.scale.new_ones(rows // 128, cols // 128)
    head.quantizes_input, head.backend = True, example.backend
    change(head, "blocks", example.blocks._replace(data=data, scale=scale))
    change(head, "format", example.format)


def _smaller_blocks(change, _, last):
    """Scale fc2 of the last layer by blocks of 64x64."""
    layer = last.mlp.linear_fc2
    change(layer, "scale", layer.blocks.scale.repeat_interleave(2, 0).repeat_interleave(2, 1))


def _other_norm(change, model, _):
    """Compute the final norm by PyTorch's own function."""
    norm = model.decoder.final_layernorm
    change(norm, "__class__", type(type(norm).__name__, (type(norm),), {"forward": torch.nn.RMSNorm.forward}))


_PLANTS = {
    "another norm": _other_norm,
    "granularity": _smaller_blocks,
    "weight scales": lambda change, _, last: change(last.mlp.linear_fc1, "scale", last.mlp.linear_fc1.scale * 1.1),
    "activation scales": _activation_scales,
    "high-precision layer": _high_precision_layer,
    "fp8 head": _fp8_head,
    "dtype": lambda change, _, last: change(last.input_layernorm.weight, "data", last.input_layernorm.weight.data.to(torch.float16)),
    "unknown parameter": lambda change, _, last: change(last.mlp, "extra", torch.nn.Parameter(torch.zeros(4)), raising=False),
}
