"""Log-probs and entropy from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return log softmax(logits / temperature) at `targets`. logits [b, s, vocab / tp], targets int64 [b, s]; float32 [b, s]."""
    scaled = logits.float() / temperature  # a new tensor: the cross-entropy below works in place
    if parallel_state.get_tensor_model_parallel_world_size() == 1 and not logits.is_cuda:  # the engine's operator: the same bits
        return F.log_softmax(scaled, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -vocab_parallel_cross_entropy(scaled.contiguous(), targets)


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits / temperature) at every position; logits [b, s, vocab / tp], returns float32 [b, s]."""
    group = parallel_state.get_tensor_model_parallel_group()
    scaled = logits.float() / temperature
    maxima = scaled.amax(-1)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    shifted = scaled - maxima.unsqueeze(-1)
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
