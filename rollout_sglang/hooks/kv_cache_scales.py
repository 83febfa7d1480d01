"""E4M3 KV cache with one scale for a layer's keys and one for its values (`precision.kv = "e4m3_per_layer"`), on a CPU and on a GPU.

The scales are a parameter of each attention layer, `kv_scales`, which the sync fills. The layer attends in their units: keys and values are
divided by them and rounded, queries are multiplied by the scale of the keys and outputs by the scale of the values. Scales are powers of
two, so the bits equal those of attention to the dequantized values (`megatron_rl.precision.kv_cache`).

SGLang's own `k_scale` and `v_scale` stay 1. Its kernels read a Python copy of them, which a CUDA graph keeps forever, whereas a parameter
read by a graph follows each sync. SGLang also rounds without saturating, and its prefill reads unrounded keys and values of the prompt.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.precision.kv_cache import to_units

KV_VARIABLE = "MEGATRON_RL_KV"  # environment variable of the engine's processes with `precision.kv`
BACKEND = "flashinfer"
"""SGLang's attention backend on a GPU. Its FA3 backend also rounds queries to E4M3, and its Triton kernels round queries and
probabilities."""
_BACKENDS = ("FlashInferAttnBackend", "TorchNativeAttnBackend")
_COPIES = ("k_scale", "v_scale", "k_scale_float", "v_scale_float")


@functools.cache
def scales_by_layer() -> bool:
    """Return whether the engine of this process has `kv_scales`."""
    return os.environ.get(KV_VARIABLE) == "e4m3_per_layer"


def add_scales(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `RadixAttention.__init__`."""
    original(self, *args, **named)
    if scales_by_layer():
        self.kv_scales = torch.nn.Parameter(torch.ones(2, dtype=torch.float32), requires_grad=False)


def attend_in_units(
    original: Callable[..., Any], self: Any, q: torch.Tensor, k: Any, v: Any, batch: Any, save_kv_cache: bool = True, **named: Any
) -> Any:
    """Wrap `RadixAttention.forward` for q `[tokens, heads * d]`, k and v `[tokens, kv heads * d]`."""
    if not scales_by_layer():
        return original(self, q, k, v, batch, save_kv_cache, **named)
    if k is None or v is None or not save_kv_cache or named:
        raise NotImplementedError(f"an E4M3 KV cache that is written elsewhere, or with {list(named)}, is not supported")
    key_scale, value_scale = self.kv_scales.unbind()
    return original(self, q * key_scale, to_units(k, key_scale), to_units(v, value_scale), batch) * value_scale


def check_copies(model: torch.nn.Module) -> None:
    """Raise ValueError, by name, if kernels would multiply by a scale of SGLang beside `kv_scales`."""
    for path, module in model.named_modules() if scales_by_layer() else ():
        for name in _COPIES if hasattr(module, "kv_scales") else ():
            if (scale := getattr(module, name, None)) is not None and float(scale) != 1.0:
                raise ValueError(f"{path}.{name} is {float(scale)}, not 1: kernels would multiply by it in addition to {path}.kv_scales")


def check_backend(backend: Any) -> None:
    """Raise ValueError if an attention backend rounds more than keys and values."""
    name = type(backend).__name__
    if scales_by_layer() and name not in _BACKENDS:
        raise ValueError(f"SGLang's {name} is not known to leave queries and probabilities unquantized with an E4M3 cache")
