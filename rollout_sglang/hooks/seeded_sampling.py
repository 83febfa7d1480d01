"""Sampling that depends only on a completion's seed and the token's position, not on the rest of the batch. SGLang uses seeds only in its
deterministic mode, which needs its GPU kernels. On the CPU tier every request has a seed, its own or a random one. The sampled token is the
first whose cumulative probability exceeds a number in [0, 1) hashed from seed and position. Tokens excluded by top_p, top_k and min_p are
removed from the logits before, so that log-probs belong to the distribution that is sampled."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.batch.draws import hash_to_uniform
from megatron_rl.config.rollout import MOST_KEPT


def attach_seeds(original: Callable[..., Any], cls: type, batch: Any, *args: Any, **named: Any) -> Any:
    """Wrap `SamplingBatchInfo.from_schedule_batch`: add int64 seeds `[requests]`, which SGLang keeps in step with its batches."""
    info = original(cls, batch, *args, **named)
    requested = [request.sampling_params.sampling_seed for request in batch.reqs]
    random = torch.randint(2**62, (len(requested),)).tolist()
    seeds = [random_seed if seed is None else seed for seed, random_seed in zip(requested, random, strict=True)]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info


def truncate(logits: torch.Tensor, sampling: Any) -> None:
    """Set the logits `[n, vocabulary]` of tokens that top_p, top_k and min_p of a `SamplingBatchInfo` exclude to -inf, in place."""
    settings = zip(*(values.tolist() for values in (sampling.top_ps, sampling.top_ks, sampling.min_ps)), strict=True)
    probs = torch.softmax(logits / sampling.temperatures, -1)
    for row, (top_p, top_k, min_p) in enumerate(settings):
        if top_p < 1 or top_k < logits.shape[-1] or min_p > 0:
            kept = find_kept_tokens(probs[row], top_p, top_k, min_p)
            logits[row] = torch.full_like(logits[row], -torch.inf).index_copy_(0, kept, logits[row, kept])


def find_kept_tokens(probs_V: torch.Tensor, top_p: float, top_k: int, min_p: float) -> torch.Tensor:
    """Return the int64 ids of the tokens to sample from, most probable first: those among the `top_k` most probable that `top_p` and
    `min_p` keep. Each bound applies to the whole distribution. Among equally probable tokens, the first in the vocabulary ranks higher.
    Tokens below 1 / 2v of the mass that `top_p` cuts off are not sorted, because all of them together are too improbable to be kept."""
    size, total = len(probs_V), float(probs_V.sum(dtype=torch.float64))
    threshold = max(min_p * float(probs_V.max()), (1 - top_p) * total / (2 * size))
    if top_k < size:
        threshold = max(threshold, float(probs_V.topk(top_k).values[-1]))
    candidates = (probs_V >= threshold).nonzero().view(-1)
    sorted_probs, order = probs_V[candidates].double().sort(descending=True, stable=True)
    before = sorted_probs.cumsum(0) - sorted_probs
    return candidates[order][:top_k][(before < top_p * total)[:top_k]] if top_p < 1 else candidates[order][:top_k]


def sample_truncated(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """Replace `top_k_top_p_min_p_sampling_from_probs_torch`; `truncate` has already applied the bounds. With `return_filtered_probs`, also
    return the probabilities of the kept tokens, largest first, their ids, and the probability of the sampled token."""
    tokens = sample_tokens(probs, sampling_seed, positions)
    if not return_filtered_probs:
        return tokens
    most = min(int((probs > 0).sum(-1).max()), MOST_KEPT)  # only rows that nobody requests have more
    weights, ids = probs.topk(most)
    return tokens, weights, ids.int(), probs.gather(1, tokens.long()[:, None]).view(-1)


def sample_tokens(probs: torch.Tensor, sampling_seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Replace SGLang's `sampling_from_probs_torch`: return int32 tokens `[n]` for probs `[n, vocabulary]`, seeds and positions `[n]`."""
    cumulated = probs.double().cumsum(-1)
    thresholds = torch.from_numpy(hash_to_uniform(sampling_seed.numpy(), positions.numpy()))[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, thresholds, right=True).clamp_(max=probs.shape[-1] - 1).view(-1).to(torch.int32)
