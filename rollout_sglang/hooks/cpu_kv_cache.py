"""E4M3 KV cache of the engine on a CPU (`precision.kv`), where SGLang supports only Intel's own kernels.

A slot's row holds the bytes and the scale of each head (`megatron_rl.precision.kv_cache.pack`). With latent attention (MLA), it holds those
of the latent followed by those of its rotated positions. With scales per layer, it holds only bytes in the units of these scales
(`hooks.kv_cache_scales`). SGLang's prefix tree, retraction and memory release handle slots and are unaffected.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.precision import kv_cache
from rollout_sglang.hooks.kv_cache_scales import KV_VARIABLE, scales_by_layer


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
    _refuse_options(*args, *named.values())
    number = layer.layer_id - self.start_layer
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
