"""Causal attention of a batch without padding, which packed attention must equal for each sequence."""

from typing import Any

import torch

from megatron_rl.kernels.batch_invariant import attention, attention_gradients


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        batch, _, tokens, _ = query.shape
        return attention(query, key, value, torch.arange(tokens).expand(batch, tokens), scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *attention_gradients(ctx.saved_tensors, gradient, ctx.scale), None


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Return `attention` of every token to itself and all tokens before, with gradient. s equals t; a scale of None is 1 / sqrt(d)."""
    return _CausalAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
