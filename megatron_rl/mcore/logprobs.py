"""Log-probs and entropy from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return log softmax(logits / temperature) at `targets`, over the tokens `kept` (`MicroBatch.kept_tokens`) where these are given.

    logits [b, s, vocab / tp], targets int64 [b, s], kept int32 [b, s, most]; float32 [b, s].
    """
    scaled = logits.float() / temperature  # a new tensor: what follows works in place
    if kept is not None:
        scaled.masked_fill_(_find_left_out(kept, scaled.shape[-1]), -torch.inf)
    if parallel_state.get_tensor_model_parallel_world_size() == 1 and not logits.is_cuda:  # the engine's operator: the same bits
        return F.log_softmax(scaled, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return -vocab_parallel_cross_entropy(scaled.contiguous(), targets)


def _find_left_out(kept: torch.Tensor, size: int) -> torch.Tensor:
    """Return bool [b, s, size], True for those of this rank's tokens that are not kept; nowhere True where none is given."""
    local = kept.long() - parallel_state.get_tensor_model_parallel_rank() * size
    elsewhere = (kept < 0) | (local < 0) | (local >= size)
    left_out = (kept[..., :1] >= 0).expand(*kept.shape[:-1], size + 1).clone()  # the last is for what lies elsewhere
    return left_out.scatter_(-1, local.masked_fill(elsewhere, size), False)[..., :size]


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits / temperature), over all tokens, at every position.

    logits [b, s, vocab / tp]; float32 [b, s].
    """
    group = parallel_state.get_tensor_model_parallel_group()
    scaled = logits.float() / temperature
    maxima = scaled.amax(-1)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    shifted = scaled - maxima.unsqueeze(-1)
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
