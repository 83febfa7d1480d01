"""What SGLang imports from FlashInfer: the router of DeepSeek-V3, and attention (`flashinfer_attention`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from rollout_sglang.rehearsal.kernels import flashinfer_attention
from rollout_sglang.rehearsal.kernels.match import HALF, Call


def install() -> None:
    import flashinfer.cascade
    import flashinfer.fused_moe

    flashinfer.fused_moe.fused_topk_deepseek = fused_topk_deepseek
    flashinfer.cascade.merge_state = flashinfer_attention.merge_state
    for known in (*flashinfer_attention.WRAPPERS, flashinfer_attention.fast_decode_plan):
        setattr(flashinfer, known.__name__, known)
    sys.modules["flashinfer.decode._grouped_size_compiled_for_decode_kernels"] = None  # type: ignore[assignment] # which 0.7 has no more


def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: Any = True,
) -> None:
    """flashinfer/fused_moe/fused_routing_dsv3.py"""
    call = Call("flashinfer.fused_topk_deepseek")
    kinds = (*HALF, torch.float32)
    call.check("scores", scores, "T N", kinds)
    call.check("bias", bias, "N", kinds)
    call.check("topk_values", topk_values, "T K", kinds)
    call.check("topk_indices", topk_indices, "T K", (torch.int32, torch.int64))
    experts = call.sizes["N"]
    fits = topk <= 8 and topk_group <= n_group and topk_group * n_group >= topk and experts % n_group == 0
    narrow = n_group == 1 or (experts // n_group <= 32 and experts // n_group * topk_group <= 128)
    call.require(fits and narrow and experts <= 384, f"{topk} of {experts} experts, {topk_group} of {n_group} groups")
    call.moved(scores, bias, topk_values, topk_indices)


STANDS_FOR: dict[str, Callable[..., Any]] = flashinfer_attention.STANDS_FOR | {
    "flashinfer.fused_moe.fused_topk_deepseek": fused_topk_deepseek
}
