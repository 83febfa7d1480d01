"""What a quantised engine should compute, computed by the trainer's own model: its linear layers made to multiply as the engine's do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl import int8
from megatron_rl.batch import Sequence
from megatron_rl.fp8.products import fprop
from megatron_rl.fp8.quantize import Blocks, dequantize_weight
from megatron_rl.mcore.linear import fp8_layers
from megatron_rl.types import Sampling
from parallel.plan import scale_name
from support import served
from support.trainer import Trainer


def generate(prompts: list[list[int]], tokens: int = 24) -> dict[str, torch.Tensor]:
    """Samples answers from the served engine; log-probs of all sampled tokens by the engine, the trainer, and the trainer's model with
    the products of the engine."""
    here = served._now[0]
    assert not fp8_layers(here.trainer.model)  # the trainer computes in high precision
    answers = here.engine.generate(prompts, Sampling(temperature=1.0, max_new_tokens=tokens))
    sequences = [Sequence(prompt, answer.output_ids_T) for prompt, answer in zip(prompts, answers, strict=True)]
    trainer = torch.cat(here.trainer.actor.logprobs(sequences)[0])
    with engine_products(here.trainer) as layers:
        emulated = torch.cat(here.trainer.actor.logprobs(sequences)[0])
    assert layers == 4 * here.trainer.hf_config["num_hidden_layers"]
    return {
        "engine": torch.tensor([value for answer in answers for value in answer.logprobs_T]),
        "trainer": trainer,
        "emulated": emulated,
    }


@contextmanager
def engine_products(trainer: Trainer) -> Iterator[int]:
    """Within it, the linear layers of a trainer on one rank compute with what `planes` gives to the engine. Yields their number."""
    planes, changed = trainer.planes(), []
    for name, layer in trainer.model.named_modules():
        weight = f"{name}.weight"
        multiply = _product(planes, weight, trainer)
        if multiply is not None:
            assert layer.bias is None
            layer._forward_impl = lambda input, weight, multiply=multiply, **_: multiply(input)
            changed.append(layer)
    try:
        yield len(changed)
    finally:
        for layer in changed:
            del layer._forward_impl


def _product(planes: dict[str, torch.Tensor], weight: str, trainer: Trainer) -> Callable[[torch.Tensor], Any] | None:
    if (scale := planes.get(scale_name(weight, "int8"))) is not None:
        values = planes[weight].float()
        return lambda x: int8.product(x, values, scale)
    if (scale := planes.get(scale_name(weight))) is not None:
        values = dequantize_weight(Blocks(planes[weight], scale))  # heads of 128: the blocks lie in the parameter's order
        return lambda x: fprop(x, values, trainer.contract.scale_format)
    return None
