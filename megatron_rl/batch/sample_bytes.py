"""Serializes training samples, which rank 0 sends to the replica that trains on them. Fields that the trainer computes are not included.

    header      pickled: number of samples, and for each column its dtype, shape and length in every sample
    columns     one after the other, each concatenated over all samples; wide dtypes first, so that every column is aligned

A response token takes 8 bytes, plus 1 if it may be of an older version, plus layers x k (x 2 above 256 experts) for its routing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megatron_rl.batch.packing import round_up
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.types import KeptTokens

_NUMBERS = ("number", "advantage", "reward", "excluded", "loss_weight")
_COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "routed_experts", "version_lags", "response_mask")
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Column:
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    lengths: np.ndarray  # int32 [samples]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.row_shape))

    @property
    def bytes(self) -> int:
        return self.row_bytes * int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True)
class _Header:
    numbers: dict[str, np.ndarray]  # values of scalar fields, one per sample, by field name
    has_kept_tokens: np.ndarray
    columns: list[_Column]


class SampleBytes:
    """Samples ready to be sent. Nothing is copied before `iterate`."""

    def __init__(self, samples: list[TrainingSample]) -> None:
        parts = [[getattr(sample, name) for sample in samples] for name in _COLUMNS]
        kept = [sample.kept_tokens or KeptTokens(*[np.empty(0, np.int32)] * 2) for sample in samples]
        parts[2:2] = [[torch.from_numpy(tokens.counts) for tokens in kept], [torch.from_numpy(tokens.ids) for tokens in kept]]
        self._parts = parts
        header = _Header(
            {name: np.array([getattr(sample, name) for sample in samples]) for name in _NUMBERS},
            np.array([sample.kept_tokens is not None for sample in samples], bool),
            [_describe(column) for column in parts],
        )
        pickled = pickle.dumps(header)
        self._head = len(pickled).to_bytes(8, "little") + pickled
        self._head += bytes(round_up(len(self._head), _ALIGNMENT) - len(self._head))
        self.total = len(self._head) + sum(column.bytes for column in header.columns)  # total number of bytes

    def iterate(self, piece_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the bytes in pieces, uint8 [`piece_bytes`], the last may be shorter. Every piece reuses the same memory."""
        piece, filled = torch.empty(min(piece_bytes, self.total), dtype=torch.uint8), 0
        for part in self._iterate_parts():
            while len(part):
                taken = min(len(part), len(piece) - filled)
                piece[filled : filled + taken] = part[:taken]
                part, filled = part[taken:], filled + taken
                if filled == len(piece):
                    yield piece
                    filled = 0
        if filled:
            yield piece[:filled]

    def _iterate_parts(self) -> Iterator[torch.Tensor]:
        yield torch.frombuffer(bytearray(self._head), dtype=torch.uint8)
        for column in self._parts:
            for part in column:
                if part.numel():
                    yield part.contiguous().view(-1).view(torch.uint8)


def read_samples(data: torch.Tensor) -> list[TrainingSample]:
    """Return the samples in `data`, uint8 with all bytes. Their columns are views of `data`."""
    length = int.from_bytes(bytes(data[:8].numpy()), "little")
    header: _Header = pickle.loads(bytes(data[8 : 8 + length].numpy()))
    start, parts = round_up(8 + length, _ALIGNMENT), []
    for column in header.columns:
        flat = data[start : start + column.bytes].view(column.dtype)
        parts.append(flat.view(-1, *column.row_shape).split(column.lengths.tolist()))
        start += column.bytes
    prompts, responses, counts, ids, logprobs, experts, lags, masks = parts
    numbers = [values.tolist() for values in header.numbers.values()]
    return [
        TrainingSample(
            prompts[index],
            responses[index],
            rollout_logprobs=logprobs[index],
            routed_experts=experts[index],
            version_lags=lags[index],
            response_mask=masks[index],
            kept_tokens=KeptTokens(counts[index].numpy(), ids[index].numpy()) if has_kept else None,
            **dict(zip(header.numbers, values, strict=True)),
        )
        for index, (has_kept, *values) in enumerate(zip(header.has_kept_tokens.tolist(), *numbers, strict=True))
    ]


def _describe(parts: list[torch.Tensor]) -> _Column:
    kinds = {(part.dtype, tuple(part.shape[1:])) for part in parts if part.numel()} or {(torch.uint8, ())}
    if len(kinds) > 1:
        raise ValueError(f"samples disagree on the dtype or shape of a column: {kinds}")
    return _Column(*kinds.pop(), np.array([len(part) for part in parts], np.int32))
