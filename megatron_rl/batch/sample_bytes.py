"""Serializes training samples, without fields that the trainer computes: rank 0 sends them to the replica that trains on them. A pickled
header is followed by the columns, each concatenated over all samples; wide dtypes come first, so that every column is aligned. A response
token takes 8 bytes, plus 1 if it may be of an older version, plus layers x k (x 2 above 256 experts) for its routing."""

import math
import pickle
from collections.abc import Iterator

import numpy as np
import torch

from megatron_rl.batch.packing import round_up
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.types import KeptTokens

_NUMBERS = ("number", "advantage", "reward", "excluded", "loss_weight")
_COLUMNS = ("prompt_ids", "response_ids", "rollout_logprobs", "routed_experts", "version_lags", "response_mask")
_ALIGNMENT = 16


class SampleBytes:
    """Samples ready to be sent. Contiguous tensors are not copied before `iterate`."""

    def __init__(self, samples: list[TrainingSample]) -> None:
        parts = [[getattr(sample, name) for sample in samples] for name in _COLUMNS]
        kept = [sample.kept_tokens or KeptTokens(*[np.empty(0, np.int32)] * 2) for sample in samples]
        parts[2:2] = [[torch.from_numpy(tokens.counts) for tokens in kept], [torch.from_numpy(tokens.ids) for tokens in kept]]
        numbers = {name: np.array([getattr(sample, name) for sample in samples]) for name in _NUMBERS}
        have_kept = [sample.kept_tokens is not None for sample in samples]
        pickled = pickle.dumps((numbers, have_kept, [_describe(column) for column in parts]))
        head = len(pickled).to_bytes(8, "little") + pickled
        head += bytes(round_up(len(head), _ALIGNMENT) - len(head))
        flat = (part.contiguous().view(-1).view(torch.uint8) for column in parts for part in column if part.numel())
        self._parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8), *flat]
        self.total = sum(map(len, self._parts))  # total number of bytes

    def iterate(self, piece_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the bytes in pieces, uint8 [`piece_bytes`], the last may be shorter. Every piece reuses the same memory."""
        piece, filled = torch.empty(min(piece_bytes, self.total), dtype=torch.uint8), 0
        for part in self._parts:
            while len(part):
                taken = min(len(part), len(piece) - filled)
                piece[filled : filled + taken] = part[:taken]
                part, filled = part[taken:], filled + taken
                if filled == len(piece):
                    yield piece
                    filled = 0
        if filled:
            yield piece[:filled]


def read_samples(data: torch.Tensor) -> list[TrainingSample]:
    """Return the samples in `data`, uint8 with all bytes. Their columns are views of `data`."""
    length = int.from_bytes(bytes(data[:8].numpy()), "little")
    numbers, have_kept, columns = pickle.loads(bytes(data[8 : 8 + length].numpy()))
    start, parts = round_up(8 + length, _ALIGNMENT), []
    for dtype, row_shape, lengths in columns:
        end = start + dtype.itemsize * math.prod(row_shape) * int(lengths.sum(dtype=np.int64))
        parts.append(data[start:end].view(dtype).view(-1, *row_shape).split(lengths.tolist()))
        start = end
    prompts, responses, counts, ids, logprobs, experts, lags, masks = parts
    rows = zip(have_kept, *(values.tolist() for values in numbers.values()), strict=True)
    return [
        TrainingSample(
            prompts[index],
            responses[index],
            rollout_logprobs=logprobs[index],
            routed_experts=experts[index],
            version_lags=lags[index],
            response_mask=masks[index],
            kept_tokens=KeptTokens(counts[index].numpy(), ids[index].numpy()) if has_kept else None,
            **dict(zip(numbers, values, strict=True)),
        )
        for index, (has_kept, *values) in enumerate(rows)
    ]


def _describe(parts: list[torch.Tensor]) -> tuple[torch.dtype, tuple[int, ...], np.ndarray]:
    """Return a column's dtype, the shape of its rows, and its length in every sample."""
    kinds = {(part.dtype, tuple(part.shape[1:])) for part in parts if part.numel()} or {(torch.uint8, ())}
    if len(kinds) > 1:
        raise ValueError(f"samples disagree on the dtype or shape of a column: {kinds}")
    return *kinds.pop(), np.array([len(part) for part in parts], np.int32)
