"""What SGLang computes on a CPU in place of its Triton kernels: the block-FP8 linear layer and the decoding attention.

The linear layer calls the very function the trainer's forward pass calls, `megatron_rl.fp8.products.fprop`. Experts: `rollout_sglang.moe`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.fp8.products import fprop
from parallel.blocks import BLOCK
from rollout_sglang.values import values_of


def dispatch_block_fp8_linear(weight_block_size: list[int] | None = None, act_scale_ue8m0: bool = False) -> Callable[..., torch.Tensor]:
    """Stands in for SGLang's `dispatch_w8a8_block_fp8_linear`, which drops `act_scale_ue8m0` for 128x128 blocks unless DeepGEMM runs
    them: the engine would then quantise activations with fp32 scales although its checkpoint says pow2."""
    return functools.partial(block_fp8_linear, act_scale_ue8m0=act_scale_ue8m0)


def block_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    act_scale_ue8m0: bool = False,
    weight_bf16: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stands in for SGLang's `triton_w8a8_block_fp8_linear`, same arguments: input [..., K], weight E4M3 [N, K]; returns [..., N]."""
    if block_size != [BLOCK, BLOCK] or input_scale is not None:
        raise NotImplementedError(f"block size {block_size} or an input quantised beforehand is outside the precision contract")
    y = fprop(input, values_of(weight, weight_scale), "pow2" if act_scale_ue8m0 else "fp32")
    return y if bias is None else y + bias


def decode_attention(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Decoding attention of a batch as one padded SDPA per layer; SGLang's own runs one per request.

    query [requests, heads, d]; caches [slots, kv heads, d]; row r of `req_to_token` lists the slots of request r's tokens.
    """
    if encoder_lens is not None or (sliding_window_size is not None and sliding_window_size >= 0):
        raise NotImplementedError("cross attention and sliding windows are not supported on the CPU tier")
    longest = int(seq_lens.max())
    visible = torch.arange(longest, device=query.device)[None, :] < seq_lens[:, None]
    slots = req_to_token[req_pool_indices, :longest].long().masked_fill(~visible, 0)
    keys, values = (cache[slots].transpose(1, 2).to(query.dtype) for cache in (k_cache, v_cache))
    attended = F.scaled_dot_product_attention(
        query.unsqueeze(2), keys, values, attn_mask=visible[:, None, None, :], scale=scaling, enable_gqa=enable_gqa
    )
    output.copy_(attended.squeeze(2))
    return output
