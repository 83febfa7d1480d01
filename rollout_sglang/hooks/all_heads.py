"""Norms of queries and keys over all heads of a token, as in MiniMax-M2, by the trainer's operator, whose bits do not depend on how many
ranks share the heads."""

from typing import Any

import torch

from megatron_rl.kernels.norm.heads import SharedHeads, normalize


def normalize_heads(self: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `MiniMaxM2QKRMSNorm.forward`: q `[t, own * d]` and k, each by its own module."""
    return self._q_norm(q), self._k_norm(k)


def apply_norm(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Replace `MiniMaxM2RMSNormTP.forward`: x `[t, own * d]` of this rank's heads, of which it has the weight."""
    from sglang.srt.runtime_context import get_parallel

    heads = self.num_heads * self.attn_tp_size // self.num_head_replicas
    ranks = SharedHeads(heads, get_parallel().attn_tp_group.device_group)
    own = self.num_heads, self.head_dim
    return normalize(x.unflatten(-1, own), self.weight.view(own), self.variance_epsilon, ranks)[0].flatten(-2)
