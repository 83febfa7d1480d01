"""Serializes training samples, without fields that the trainer computes: rank 0 sends them to the replica that trains on them.

A header in JSON says how many samples follow and of which dtype and shape their columns are. Then come one row of numbers per sample, and
the columns, each concatenated over all samples; wide dtypes come first, so that every column is aligned. A response token takes 8 bytes,
plus 1 if it may be of an older version, plus layers x k (x 2 above 256 experts) for its routing. Nothing is unpickled.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter

from megatron_rl.batch.packing import round_up
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.types import KeptTokens, RemoteColumns

_NUMBERS = ("number", "advantage", "reward", "excluded", "masked", "loss_weight")
_COLUMNS = ("seeds", "prompt_ids", "response_ids", "rollout_logprobs", "routed_experts", "version_lags", "response_mask")
_ALIGNMENT = 16
_ROW = np.dtype(
    {
        "names": [*_NUMBERS, "has_kept", "lengths"],
        "formats": ["<i8", "<f8", "<f8", "?", "?", "<f8", "?", ("<i4", len(_COLUMNS) + 2)],  # with the two columns of kept tokens
    }
)


class _Header(NamedTuple):
    samples: int
    columns: list[tuple[str, list[int]]]  # torch's name of the dtype, and shape of a row
    remotes: list[RemoteColumns | None]  # of each sample


_HEADER = TypeAdapter(_Header)


class SampleBytes:
    """Samples ready to be sent. Contiguous tensors are not copied before `iterate`."""

    def __init__(self, samples: list[TrainingSample]) -> None:
        parts = [[getattr(sample, name) for sample in samples] for name in _COLUMNS]
        kept = [sample.kept_tokens or KeptTokens(*[np.empty(0, np.int32)] * 2) for sample in samples]
        parts[3:3] = [[torch.from_numpy(tokens.counts) for tokens in kept], [torch.from_numpy(tokens.ids) for tokens in kept]]
        rows = np.empty(len(samples), _ROW)
        for name in _NUMBERS:
            rows[name] = [getattr(sample, name) for sample in samples]
        rows["has_kept"] = [sample.kept_tokens is not None for sample in samples]
        rows["lengths"] = np.array([[part.size(0) for part in column] for column in parts]).T  # `len` of a tensor is slow
        header = _HEADER.dump_json(_Header(len(samples), [_describe(column) for column in parts], [sample.remote for sample in samples]))
        head = len(header).to_bytes(8, "little") + header + rows.tobytes()
        head += bytes(round_up(len(head), _ALIGNMENT) - len(head))
        flat = (part.contiguous().numpy().reshape(-1).view(np.uint8) for column in parts for part in column if part.numel())
        self._parts = [np.frombuffer(head, np.uint8), *flat]  # NumPy cuts thousands of small arrays several times as fast as torch
        self.total = sum(map(len, self._parts))  # total number of bytes

    def iterate(self, piece_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the bytes in pieces, uint8 [`piece_bytes`], the last may be shorter. Every piece reuses the same memory."""
        piece, filled = np.empty(min(piece_bytes, self.total), np.uint8), 0
        for part in self._parts:
            while len(part):
                taken = min(len(part), len(piece) - filled)
                piece[filled : filled + taken] = part[:taken]
                part, filled = part[taken:], filled + taken
                if filled == len(piece):
                    yield torch.from_numpy(piece)
                    filled = 0
        if filled:
            yield torch.from_numpy(piece[:filled])


def read_samples(data: torch.Tensor) -> list[TrainingSample]:
    """Return the samples in `data`, uint8 with all bytes. Their columns are views of `data`. Raise ValueError for other data."""
    rows_start = 8 + int.from_bytes(bytes(data[:8].numpy()), "little")
    header = _HEADER.validate_json(bytes(data[8:rows_start].numpy()), strict=True)
    rows_end = rows_start + header.samples * _ROW.itemsize
    rows = np.frombuffer(bytes(data[rows_start:rows_end].numpy()), _ROW)
    start, parts = round_up(rows_end, _ALIGNMENT), []
    for (name, row_shape), lengths in zip(header.columns, rows["lengths"].T, strict=True):
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"training samples with a column of {name!r}, which is not a dtype")
        end = start + dtype.itemsize * math.prod(row_shape) * int(lengths.sum(dtype=np.int64))
        parts.append(data[start:end].view(dtype).view(-1, *row_shape).split(lengths.tolist()))
        start = end
    if start != len(data):
        raise ValueError(f"training samples take {start} bytes, but {len(data)} arrived")
    seeds, prompts, responses, counts, ids, logprobs, experts, lags, masks = parts
    numbers = zip(rows["has_kept"].tolist(), *(rows[name].tolist() for name in _NUMBERS), strict=True)
    return [
        TrainingSample(
            prompts[index],
            responses[index],
            rollout_logprobs=logprobs[index],
            routed_experts=experts[index],
            version_lags=lags[index],
            response_mask=masks[index],
            seeds=seeds[index],
            kept_tokens=KeptTokens(counts[index].numpy(), ids[index].numpy()) if has_kept else None,
            remote=header.remotes[index],
            **dict(zip(_NUMBERS, values, strict=True)),
        )
        for index, (has_kept, *values) in enumerate(numbers)
    ]


def _describe(parts: list[torch.Tensor]) -> tuple[str, list[int]]:
    """Return the name of a column's dtype and the shape of its rows."""
    kinds = {(part.dtype, tuple(part.shape[1:])) for part in parts if part.numel()} or {(torch.uint8, ())}
    if len(kinds) > 1:
        raise ValueError(f"samples disagree on the dtype or shape of a column: {kinds}")
    dtype, row_shape = kinds.pop()
    return str(dtype).removeprefix("torch."), list(row_shape)
