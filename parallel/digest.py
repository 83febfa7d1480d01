"""Rectangles of real tensors: a view, its raw bytes, its digest. Trainer and engine both access memory through these functions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

from parallel.formats import FormatOf
from parallel.reshard import list_stored_tensors
from parallel.shards import NamedRect, Rect, Shard

ByteMatrix: TypeAlias = Any
"""uint8 [rows, bytes of a row]: numpy on the CPU, a tensor elsewhere. Slicing and assigning are the same for both."""


def make_stored_tensors(shards: Iterable[Shard], format_of: FormatOf) -> dict[str, torch.Tensor]:
    """Allocate, filled with zeros, the tensors that store some shards: values and scales by name."""
    stored = list_stored_tensors(shards, format_of)
    return {name: torch.zeros(shape, dtype=getattr(torch, format.dtype)) for name, (format, shape) in stored.items()}


def view_rect(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    """Return the view of a rectangle; a one-dimensional tensor counts as N x 1, stacked matrices [E, R, C] as E * R x C."""
    if tensor.dim() == 3:
        tensor = tensor.view(-1, tensor.shape[2])  # a view or an error, never a copy
    if tensor.dim() == 1:
        return tensor[rect.row : rect.row + rect.rows]
    return tensor[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def view_bytes(tensor: torch.Tensor) -> ByteMatrix:
    """Return the tensor's bytes as uint8 [rows, cols * itemsize], a view: writing to it writes to the tensor.

    On the CPU it is a numpy array, whose slices cost a tenth of a tensor's. Raises ValueError where a row's values are not contiguous,
    or (RuntimeError) stacked matrices do not lie one below the other.
    """
    matrix = tensor.detach()
    if matrix.dim() == 1:
        matrix = matrix.unsqueeze(1)
    elif matrix.dim() == 3:
        matrix = matrix.view(-1, matrix.shape[2])  # stacked matrices, as in `view_rect`; a view or an error, never a copy
    if matrix.dim() != 2 or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has no rows of bytes")
    return as_byte_matrix(matrix.view(torch.uint8))


def as_byte_matrix(values: torch.Tensor) -> ByteMatrix:
    """Return uint8 values, a flat buffer or a matrix, in the same form, without a copy."""
    return values.numpy() if values.device.type == "cpu" else values


class Hash:
    """128 bits of XXH3 over the bytes it is given. Of bytes on a GPU it hashes the sums that `digest_triton` computes there: another
    digest than the host's of the same bytes, so both sides must hold them on the same kind of device."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._pending: list[torch.Tensor] = []

    def update(self, matrix: ByteMatrix) -> None:
        """Add uint8 [rows, bytes of a row]. On a GPU this only starts the work, on the current stream."""
        if isinstance(matrix, np.ndarray):
            self._state.update(np.ascontiguousarray(matrix).data)
            return
        from parallel.digest_triton import run_sums

        self._state.update(matrix.numel().to_bytes(8, "little"))
        self._pending.append(run_sums(matrix.contiguous().view(-1)))

    def hexdigest(self) -> str:
        """Return 32 hex digits; on a GPU, wait for the work there."""
        if self._pending:
            self._state.update(torch.cat(self._pending).cpu().numpy().data)
            self._pending.clear()
        return self._state.hexdigest()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in row order, uint8 [numel * itemsize] on its device; shares memory if the tensor is contiguous.

    `contiguous()` keeps the strides of a tensor with one element, whatever they are, and `view(torch.uint8)` refuses a stride other than 1.
    """
    values = tensor.detach().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's bytes as uint8 [numel * itemsize]; shares memory where the tensor is contiguous and on the CPU."""
    return flat_bytes(tensor).cpu().numpy()


def digest(tensor: torch.Tensor, rect: Rect) -> str:
    """Return the `Hash` of a rectangle's raw bytes in row order. Detects corruption; it is no cryptographic hash."""
    return _start_hash(tensor, rect).hexdigest()


def digest_all(tensors: Mapping[str, torch.Tensor], named_rects: Sequence[NamedRect]) -> list[str]:
    """Return the `digest` of every rectangle, in order. On the host, uses all cores this process may use: XXH3 releases the GIL."""
    if any(tensor.is_cuda for tensor in tensors.values()):
        hashes = [_start_hash(tensors[name], rect) for name, rect in named_rects]  # starts all work before it waits for the first
        return [each.hexdigest() for each in hashes]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda named_rect: digest(tensors[named_rect[0]], named_rect[1]), named_rects))


def _start_hash(tensor: torch.Tensor, rect: Rect) -> Hash:
    rect_hash, values = Hash(), view_rect(tensor, rect)
    rect_hash.update(flat_bytes(values) if tensor.is_cuda else raw_bytes(values))
    return rect_hash
