"""An engine that starts without weights: SGLang makes some up, for every tensor of the model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rollout_sglang.rank_handler import live_tensors


def make_up_weights(original: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Wrap SGLang's `initialize_dummy_weights`: what no sync replaces stays as the model made it, buffers and the scales of the KV cache. A
    positive scale would count as loaded, and kernels multiply with it. `kv_scales` stay as well: they are powers of two."""
    filled = {tensor.data_ptr() for name, tensor in live_tensors(model).items() if not name.endswith(".kv_scales")}
    kept = [(tensor, tensor.clone()) for tensor in model.state_dict().values() if tensor.data_ptr() not in filled]
    original(model, *args, **kwargs)
    for tensor, value in kept:
        tensor.copy_(value)
