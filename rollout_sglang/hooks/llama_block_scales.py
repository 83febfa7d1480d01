"""Block scales of FP8 Llama checkpoints: SGLang 0.5.23 looks for them under another name, warns, and serves uninitialised ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

NamedTensor = tuple[str, torch.Tensor]
_SCALE = ".weight_scale_inv"


def load_block_scales(original: Callable[..., Any], model: Any, weights: Iterable[NamedTensor]) -> Any:
    """Wrap `LlamaForCausalLM.load_weights`: pass everything but the block scales on to it, and load these by SGLang's own table.

    Raise KeyError for the scale of a weight that is not FP8 in the engine.
    """
    from sglang.srt.model_loader.auto_loader import LLAMA_STACKED_MAPPING

    scales: list[NamedTensor] = []

    def without_scales() -> Iterator[NamedTensor]:
        for name, value in weights:
            if name.endswith(_SCALE):
                scales.append((name, value))
            else:
                yield name, value

    result = original(model, without_scales())
    parameters = dict(model.named_parameters())
    for name, value in scales:
        target = LLAMA_STACKED_MAPPING.try_load(name, value, parameters)
        if target is None:
            parameters[name].weight_loader(parameters[name], value)
        elif target not in parameters:
            raise KeyError(target)
    return result
