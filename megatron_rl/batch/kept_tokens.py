"""Sampling masks: the tokens that each sampled token was drawn from, if top_p, top_k or min_p excluded some. The trainer normalizes its
log-probs over the same tokens, so both sides describe the distribution that was sampled from, in every precision mode and at every age of a
token ("keep sampling mask": DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from megatron_rl.types import KeptTokens


def make_kept_tokens(ids_by_token: Sequence[Sequence[int]]) -> KeptTokens:
    counts = np.fromiter(map(len, ids_by_token), np.int32, len(ids_by_token))
    return KeptTokens(counts, np.fromiter(chain.from_iterable(ids_by_token), np.int32, int(counts.sum())))


def holds_tokens(kept: KeptTokens, tokens: np.ndarray) -> bool:
    """Return whether each of A tokens is among the tokens that it was drawn from."""
    owners = np.arange(len(tokens)).repeat(kept.counts)
    return bool(np.bincount(owners[kept.ids == tokens[owners]], minlength=len(tokens)).all())


def extend_kept_tokens(known: KeptTokens | None, more: KeptTokens | None) -> KeptTokens | None:
    """Return the tokens of all turns after another turn."""
    if known is None or more is None:
        return more
    return KeptTokens(np.concatenate([known.counts, more.counts]), np.concatenate([known.ids, more.ids]))


def pad_kept_tokens(kept: KeptTokens, width: int) -> torch.Tensor:
    """Return the kept ids as int32 [A, width], padded with -1."""
    padded = np.full((len(kept.counts), width), -1, np.int32)
    padded[np.arange(width) < kept.counts[:, None]] = kept.ids
    return torch.from_numpy(padded)
