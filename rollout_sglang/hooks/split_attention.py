"""Attention of an engine on a GPU by `kernels.split_attention`, in place of SGLang's Triton kernels, with `precision.reduction = "ranks"`:
prompts, chunks behind a prefix, and decoded tokens. It has never run on a GPU. SGLang's backend prepares graphs of decoding, in which the
kernel reads slots and lengths from tensors that every step fills again."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.kernels.split_attention import SPLIT, Sequences
from megatron_rl.kernels.split_attention.reference import attend

BACKEND_VARIABLE = "MEGATRON_RL_ATTENTION"  # environment variable of the engine's processes with `attention.requirements.choose_shared`


def start(original: Callable[..., None], self: Any, *args: Any, **named: Any) -> None:
    """Wrap `TritonAttnBackend.__init__`. Raise NotImplementedError for caches in which tokens are not listed one by one."""
    original(self, *args, **named)
    others = self.use_mla, self.use_sliding_window_kv_pool, self.page_size != 1, self.dcp_size > 1, self.kv_index_translator.is_translating
    if any(others) or self.dllm_attention is not None:
        raise NotImplementedError("latents, caches of windows, and pages are outside of attention with precision.reduction = 'ranks'")
    self.decoded_starts = torch.arange(self.req_to_token_pool.size + 1, device=self.device)


def extend(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **named: Any
) -> torch.Tensor:
    """Replace `TritonAttnBackend.forward_extend`: q `[tokens, heads * d]` -> the same shape. All keys are read from the cache."""
    sequences = self.forward_metadata.qo_indptr, self.forward_metadata.max_extend_len, 0
    return _attend(self, q, k, v, layer, forward_batch, save_kv_cache, sequences, **named)


def decode(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **named: Any
) -> torch.Tensor:
    """Replace `TritonAttnBackend.forward_decode`: one query per request, with all splits of the longest context at the same time."""
    sequences = self.decoded_starts[: len(forward_batch.seq_lens) + 1], 1, -(-self.max_context_len // SPLIT)
    return _attend(self, q, k, v, layer, forward_batch, save_kv_cache, sequences, **named)


def _attend(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool,
    sequences: tuple[torch.Tensor, int, int],
    sinks: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    unusual = [name for name, value in others.items() if value is not None]
    plain = layer.attn_type.value == "decoder" and not layer.is_cross_attention and k is not None
    scaled = layer.logit_cap or layer.k_scale is not None or layer.xai_temperature_len > 0
    if unusual or scaled or not plain or forward_batch.spec_info is not None:
        found = ", ".join(unusual) or "a draft, a scale or keys of another kind"
        raise NotImplementedError(f"{found} in attention is outside of precision.reduction = 'ranks'")
    if save_kv_cache:
        self._set_kv_buffer(forward_batch, layer, _locate_writes(forward_batch), k, v)
    starts, longest, splits = sequences
    table, size = self.req_to_token, layer.sliding_window_size
    described = Sequences(starts, forward_batch.seq_lens, forward_batch.req_pool_indices, table, table.stride(0), longest, splits)
    query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    caches = (self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.token_to_kv_pool.get_value_buffer(layer.layer_id))
    window = 0 if size is None or size < 0 else size + 1  # SGLang's size leaves out the token itself
    return attend(query, *caches, described, layer.scaling, sinks, window)[0].view(len(query), -1)


def _locate_writes(forward_batch: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    return KVWriteLoc.for_batch(forward_batch, swa_loc=None)
