"""Read which experts served each token from SGLang's answers (`return_routed_experts`).

SGLang keeps the router's choice beside every slot of its key-value cache, so the answer has it for a prompt's tokens and for cached ones
too: a cached prefix has the routing of the request that computed it.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape


def read_routed_experts(answer: dict[str, Any], shape: RoutingShape, tokens: int) -> np.ndarray:
    """Return the record (`megatron_rl.hf.routing_record`) of an answer with `tokens` tokens, the prompt's included.

    SGLang writes int32 in base64, all layers of the model, row by row. Raise RunError if it has another size, or an expert's number is out
    of range.
    """
    text = answer["meta_info"].get("routed_experts")
    if text is None:
        raise RunError("the engine answered without the routing that it was asked for (--enable-return-routed-experts)")
    values = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    rows = tokens - 1
    if values.size != rows * shape.num_layers * shape.top_k:
        expected = f"{rows} rows of {shape.num_layers} layers and {shape.top_k} experts"
        raise RunError(f"the engine's routing of {tokens} tokens has {values.size} numbers, not {expected}")
    if values.size and not 0 <= values.min() <= values.max() < shape.num_experts:  # check before the cast to a narrow dtype
        raise RunError(f"the engine's routing names experts {values.min()} to {values.max()} of {shape.num_experts}")
    return values.reshape(rows, shape.num_layers, shape.top_k).astype(shape.dtype)
