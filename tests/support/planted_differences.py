"""Differences of precision planted into a live Megatron model, which the comparison of graphs must find."""

from contextlib import ExitStack, contextmanager, nullcontext

import torch

from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from parallel.formats import FP8


def plant_difference(model, plant):
    """Context manager that changes one thing of a live model; "" changes nothing."""
    return _PLANTS[plant](model, model.decoder.layers[-1]) if plant else nullcontext()


@contextmanager
def _replaced(owner, **values):
    old = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(owner, name, value)


@contextmanager
def _activation_scales(model, _):
    with ExitStack() as stack:
        for layer in find_quantized_layers(model).values():
            stack.enter_context(_replaced(layer, format=FP8.with_scales("fp32")))
        yield


def _high_precision_layer(_, last):
    """Remove the blocks of the last layer's output projection, so that the engine quantizes one layer more than the trainer."""
    layer = last.self_attention.linear_proj
    return _replaced(layer, __class__=type(type(layer).__name__, (type(layer),), {"blocks": None, "__module__": type(layer).__module__}))


def _fp8_head(model, last):
    """Quantize the output layer, so that the trainer quantizes one layer more than the engine."""
    head, example = model.output_layer, last.mlp.linear_fc2
    rows, cols = head.weight.shape
    data, scale = head.weight.detach().to(torch.float8_e4m3fn), example.blocks.scale.new_ones(rows // 128, cols // 128)
    head.quantizes_input, head.backend = True, example.backend
    return _replaced(head, blocks=example.blocks._replace(data=data, scale=scale), format=example.format)


@contextmanager
def _unknown_parameter(_, last):
    last.mlp.register_parameter("extra", torch.nn.Parameter(torch.zeros(4)))
    try:
        yield
    finally:
        del last.mlp.extra


def _smaller_blocks(_, last):
    """Scale fc2 of the last layer by blocks of 64x64."""
    layer = last.mlp.linear_fc2
    return _replaced(layer, scale=layer.blocks.scale.repeat_interleave(2, 0).repeat_interleave(2, 1))


_PLANTS = {
    "granularity": _smaller_blocks,
    "weight scales": lambda _, last: _replaced(last.mlp.linear_fc1, scale=last.mlp.linear_fc1.scale * 1.1),
    "activation scales": _activation_scales,
    "high-precision layer": _high_precision_layer,
    "fp8 head": _fp8_head,
    "dtype": lambda _, last: _replaced(last.input_layernorm.weight, data=last.input_layernorm.weight.data.to(torch.float16)),
    "unknown parameter": _unknown_parameter,
}
