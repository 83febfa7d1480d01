"""Differences of precision planted into a live Megatron model, which the comparison of graphs must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers
from parallel.formats import FP8


@contextmanager
def plant_difference(model: Any, plant: str) -> Iterator[None]:
    """Context manager that changes one thing of a live model; "" changes nothing."""
    undo = _PLANTS[plant](model) if plant else lambda: None
    try:
        yield
    finally:
        undo()


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old)


def _smaller_blocks(model: Any) -> Callable[[], None]:
    """Scale fc2 of the last layer by blocks of 64x64."""
    layer = model.decoder.layers[-1].mlp.linear_fc2
    scale = layer.blocks.scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    return _set(layer, "scale", scale)


def _weight_scales(model: Any) -> Callable[[], None]:
    layer = model.decoder.layers[-1].mlp.linear_fc1
    return _set(layer, "scale", layer.scale * 1.1)


def _activation_scales(model: Any) -> Callable[[], None]:
    with ExitStack() as undone:
        for layer in find_quantized_layers(model).values():
            undone.callback(_set(layer, "format", FP8.with_scales("fp32")))
        return undone.pop_all().close


def _high_precision_layer(model: Any) -> Callable[[], None]:
    """Remove the blocks of the last layer's output projection, so that the engine quantizes one layer more than the trainer."""
    layer = model.decoder.layers[-1].self_attention.linear_proj
    return _set(layer, "__class__", type(type(layer).__name__, (type(layer),), {"blocks": None, "__module__": type(layer).__module__}))


def _fp8_head(model: Any) -> Callable[[], None]:
    """Quantize the output layer, so that the trainer quantizes one layer more than the engine."""
    head, example = model.output_layer, model.decoder.layers[-1].mlp.linear_fc2
    rows, cols = head.weight.shape
    blocks = example.blocks._replace(
        data=head.weight.detach().to(torch.float8_e4m3fn), scale=example.blocks.scale.new_ones(rows // 128, cols // 128)
    )
    with ExitStack() as undone:
        for name, value in (("blocks", blocks), ("format", example.format)):
            undone.callback(_set(head, name, value))
        head.quantizes_input, head.backend = True, example.backend
        return undone.pop_all().close


def _norm_dtype(model: Any) -> Callable[[], None]:
    norm = model.decoder.layers[-1].input_layernorm
    return _set(norm.weight, "data", norm.weight.data.to(torch.float16))


def _unknown_parameter(model: Any) -> Callable[[], None]:
    mlp = model.decoder.layers[-1].mlp
    mlp.register_parameter("extra", torch.nn.Parameter(torch.zeros(4)))
    return lambda: delattr(mlp, "extra")


_PLANTS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "granularity": _smaller_blocks,
    "weight scales": _weight_scales,
    "activation scales": _activation_scales,
    "high-precision layer": _high_precision_layer,
    "fp8 head": _fp8_head,
    "dtype": _norm_dtype,
    "unknown parameter": _unknown_parameter,
}
