"""The BF16 model that Megatron's users would build on a GPU: Transformer Engine's layers, with their fusions. What FP8 is held against.

Nothing of it is this project's but the output layer, which scores tokens in chunks: Megatron's would keep the logits of a whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig

from megatron_rl.config import PrecisionConfig
from megatron_rl.mcore import model
from megatron_rl.precision.contract import PrecisionContract
from parallel.layout import Layout

CASE = "bf16, Megatron with Transformer Engine"
FUSIONS = {
    "apply_rope_fusion": True,
    "use_te_activation_func": True,
    "gradient_accumulation_fusion": True,  # Transformer Engine's own; Megatron's layers would want apex for it
}


def transformer_engine_layers(config: TransformerConfig) -> Any:
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, use_te_activation_func=True)


def build_baseline(
    hf_config: dict[str, Any], layers_of: Callable[[Any], Any] = transformer_engine_layers, fusions: dict[str, bool] = FUSIONS
) -> GPTModel:
    """Return a dense model on one rank, whose weights are not set. Megatron must be started; the defaults need a GPU."""
    contract, plain = PrecisionContract.from_config(PrecisionConfig(mode="bf16", reduction="fast")), model._megatron_config
    with (
        patch.object(layers, "_grad_accum_fusion_available", True),  # asked by the output layer, whose own forward pass is not used
        patch.object(model, "_megatron_config", lambda *arguments: replace(plain(*arguments), **fusions)),
        patch.object(model, "build_decoder_spec", lambda config, **_: layers_of(config)),
    ):
        built: Any = model.build_model(hf_config, Layout(), contract)
    return built


def copy_weights(baseline: GPTModel, source: GPTModel) -> None:
    """Give a baseline the weights of the project's BF16 model. Norms, which lie elsewhere in Transformer Engine's layers, become one, as
    `policies.make_model` has them."""
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in baseline.named_parameters():
            if parameter.dim() == 1 and name not in weights:
                parameter.fill_(1.0)
            else:
                parameter.copy_(weights[name])
