"""Log-probs and entropy from logits whose vocabulary is split over tensor-parallel ranks.

On one rank's CPU log-probs are those of the engine's operator, bit for bit, and memory-bound work over the vocabulary is cut into rows
that stay in a core's cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

_LOGITS_IN_CACHE = 1 << 19


class _LogSoftmaxAtTargets(torch.autograd.Function):
    """log_softmax(logits / temperature) over what is kept, at the targets; the backward pass needs one matrix, softmax - one-hot."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor | None, temperature: float) -> torch.Tensor:
        logprobs = F.log_softmax(_keep(_scale(logits, temperature), kept), -1)
        ctx.save_for_backward(logprobs, targets)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return _gather(logprobs, targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logprobs, targets = ctx.saved_tensors
        scaled = (gradient / ctx.temperature).unsqueeze(-1)
        dlogits = logprobs.exp().mul_(-scaled).scatter_add_(-1, targets.unsqueeze(-1), scaled)
        return dlogits.to(ctx.dtype), None, None, None


def _scale(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def _keep(scaled: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return scaled if kept is None else scaled.masked_fill(_find_left_out(kept, scaled.shape[-1]), -torch.inf)


def _gather(logprobs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _find_left_out(kept: torch.Tensor, size: int) -> torch.Tensor:
    """Return bool [b, s, size], True for those of this rank's tokens that are not kept; nowhere True where none is given."""
    local = kept.long() - parallel_state.get_tensor_model_parallel_rank() * size
    elsewhere = (kept < 0) | (local < 0) | (local >= size)
    left_out = (kept[..., :1] >= 0).expand(*kept.shape[:-1], size + 1).clone()  # the last is for what lies elsewhere
    return left_out.scatter_(-1, local.masked_fill(elsewhere, size), False)[..., :size]


def _is_local(logits: torch.Tensor) -> bool:
    """Return whether the whole vocabulary lies on one CPU."""
    return parallel_state.get_tensor_model_parallel_world_size() == 1 and not logits.is_cuda


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Return log softmax(logits / temperature) at `targets`, over the tokens `kept` (`MicroBatch.kept_tokens`) where these are given.

    logits [b, s, vocab / tp], targets int64 [b, s], kept int32 [b, s, most]; float32 [b, s].
    """
    if _is_local(logits):
        return _LogSoftmaxAtTargets.apply(logits, targets, kept, temperature)
    scaled = _keep(logits.float() / temperature, kept)  # a new tensor: the cross-entropy below works in place
    return -vocab_parallel_cross_entropy(scaled.contiguous(), targets)


@torch.no_grad()
def score_tokens(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_logprobs`, without gradient, and the entropy in nats of softmax(logits / temperature), over all tokens.

    Shapes as there; both float32 [b, s].
    """
    if not _is_local(logits):
        return token_logprobs(logits, targets, temperature, kept), _entropy(logits, temperature)
    at_targets, entropies = torch.empty(targets.shape), torch.empty(targets.shape)
    step = max(1, _LOGITS_IN_CACHE // (len(logits) * logits.shape[-1]))
    for start in range(0, targets.shape[1], step):
        part = slice(start, start + step)
        scaled = _scale(logits[:, part], temperature)
        logprobs = F.log_softmax(scaled, -1)
        entropies[:, part] = -(logprobs.exp() * logprobs).sum(-1)
        if kept is not None:
            logprobs = F.log_softmax(_keep(scaled, kept[:, part]), -1)
        at_targets[:, part] = _gather(logprobs, targets[:, part])
    return at_targets, entropies


def _entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    scaled = logits.float() / temperature
    maxima = scaled.amax(-1)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    shifted = scaled - maxima.unsqueeze(-1)
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
