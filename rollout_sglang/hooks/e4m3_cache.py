"""E4M3 KV cache of the engine (`precision.kv`), on a CPU and on a GPU.

On a CPU, a slot's row holds the bytes and the scale of each head (`megatron_rl.precision.kv_cache.pack`); with latent attention (MLA),
those of the latent followed by those of its rotated positions.

With "e4m3_per_layer", each attention layer has a parameter `kv_scales`, which the sync fills: a scale for its keys and one for its values.
The layer attends in their units: keys and values are divided by them and rounded, queries are multiplied by the scale of the keys and
outputs by the scale of the values. Scales are powers of two, so this is exact. SGLang's own `k_scale` and `v_scale` stay 1: its kernels
read a Python copy of them, which a CUDA graph keeps forever.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.kernels.cache_units.reference import enter_units
from megatron_rl.precision import kv_cache

KV_VARIABLE = "MEGATRON_RL_KV"  # environment variable of the engine's processes with `precision.kv`
BACKEND = "flashinfer"  # SGLang's attention backend on a GPU. FA3 and Triton also round queries or probabilities.
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
    if k is None or v is None or not save_kv_cache or named.keys() - {"sinks"}:
        raise NotImplementedError(f"an E4M3 KV cache that is written elsewhere, or with {list(named)}, is not supported")
    return original(self, *enter_units(q, k, v, self.kv_scales), batch, **named) * self.kv_scales[1]


def check_copies(model: torch.nn.Module) -> None:
    """Raise ValueError, by name, if kernels would multiply by a scale of SGLang beside `kv_scales`."""
    for path, module in model.named_modules() if scales_by_layer() else ():
        for name in _COPIES if hasattr(module, "kv_scales") else ():
            if (scale := getattr(module, name, None)) is not None and float(scale) != 1.0:
                raise ValueError(f"{path}.{name} is {float(scale)}, not 1: kernels would multiply by it in addition to {path}.kv_scales")


def get_attention_pool(pool: Any) -> Any:
    """Return the pool of keys and values within SGLang's KV cache `pool`, which may also hold recurrent states."""
    return getattr(pool, "full_kv_pool", pool)


def get_attention_backend(backend: Any) -> Any:
    """Return the backend of softmax attention within SGLang's attention backend."""
    return getattr(backend, "full_attn_backend", backend)


def check_backend(backend: Any) -> None:
    """Raise ValueError if an attention backend rounds more than keys and values."""
    name = type(get_attention_backend(backend)).__name__
    if scales_by_layer() and name not in _BACKENDS:
        raise ValueError(f"SGLang's {name} is not known to leave queries and probabilities unquantized with an E4M3 cache")


@functools.cache
def stores_e4m3() -> bool:
    """Return whether the engine of this process stores keys and values in E4M3."""
    return os.environ.get(KV_VARIABLE, "high") != "high"


def stores_scales() -> bool:
    """Return whether each row has its own scale."""
    return stores_e4m3() and not scales_by_layer()


def has_scales(pool: Any) -> bool:
    """Return whether SGLang's KV cache `pool` has a scale beside each head's values."""
    if hasattr(pool, "kv_lora_rank"):
        return pool.kv_buffer[0].shape[-1] == pool.kv_lora_rank + pool.qk_rope_head_dim + 2
    return pool.k_buffer[0].shape[-1] == pool.head_dim + 1


def create_buffers(original: Callable[..., None], self: Any) -> None:
    """Wrap `MHATokenToKVPool._create_buffers`."""
    if stores_e4m3():
        self.dtype, self.store_dtype = torch.float8_e4m3fn, torch.uint8
    original(self)


def get_buffer_shapes(original: Callable[..., Any], self: Any) -> Any:
    """Wrap `MHATokenToKVPool._kv_buffer_shapes`: add a byte for each head's scale to the shapes of keys and values."""
    return tuple((*shape[:-1], shape[-1] + stores_scales()) for shape in original(self))


def set_keys_and_values(
    original: Callable[..., None], self: Any, layer: Any, place: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **named: Any
) -> None:
    """Wrap `MHATokenToKVPool.set_kv_buffer`: store keys and values `[tokens, heads, d]` in their slots."""
    if not stores_e4m3():
        return original(self, layer, place, keys, values, *args, **named)
    number = named.pop("layer_id_override", None)  # of the hybrid pool, which passes its scales of 1 too
    if number is None:
        number = layer.layer_id - self.start_layer
    _refuse_options(*(value for value in (*args, *named.values()) if value != 1.0))
    for buffer, rows in ((self.k_buffer[number], keys), (self.v_buffer[number], values)):
        buffer[place.loc] = kv_cache.pack(rows) if stores_scales() else rows.to(torch.float8_e4m3fn).view(torch.uint8)


def create_latent_buffers(original: Callable[..., None], self: Any) -> None:
    """Wrap `MLATokenToKVPool._create_buffers`."""
    self.kv_cache_dim += 2 * stores_e4m3()
    create_buffers(original, self)


def set_latents(original: Callable[..., None], self: Any, layer: Any, place: Any, rows: torch.Tensor, *args: Any, **named: Any) -> None:
    """Wrap `MLATokenToKVPool.set_kv_buffer`: store latents and positions `[tokens, 1, rank + rope]` in their slots."""
    if not stores_e4m3():
        return original(self, layer, place, rows, *args, **named)
    _refuse_options(*args[1:], *named.values())  # the first argument holds the values, which are part of the latents
    parts = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    self.kv_buffer[layer.layer_id - self.start_layer][place.loc] = torch.cat([kv_cache.pack(part) for part in parts], -1)


def get_latents(original: Callable[..., Any], self: Any, layer_id: int) -> torch.Tensor:
    """Wrap `MLATokenToKVPool.get_value_buffer`: return the latents with their scale."""
    return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank + 1] if stores_e4m3() else original(self, layer_id)


def read_rows(cache: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
    """Return rows `[n, d]` of a cache buffer `[slots, heads, d]`, seen as `[slots * heads, d]`, in float32 if it stores E4M3. If rows
    have scales, the scale of the first `first` bytes is at their end, and the scale of the remaining bytes at the row's end."""
    if cache.dtype != torch.float8_e4m3fn:
        return cache.flatten(0, 1).index_select(0, rows)
    stored = cache.view(torch.uint8).flatten(0, 1).index_select(0, rows)
    if not stores_scales():
        return stored.view(torch.float8_e4m3fn).float()
    if stored.shape[-1] == first:
        return kv_cache.unpack(stored)
    return torch.cat([kv_cache.unpack(part) for part in stored.tensor_split([first], -1)], -1)


def _refuse_options(*values: Any) -> None:
    """Raise NotImplementedError for arguments of SGLang that an E4M3 cache does not support."""
    if any(value is not None for value in values):
        raise NotImplementedError(f"an E4M3 KV cache with {values}")
