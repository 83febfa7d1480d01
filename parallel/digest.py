"""Rectangles of real tensors: a view, its raw bytes, its digest. Trainer and engine both look at memory through these functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash

from parallel.shards import NamedRect, Rect

ByteMatrix: TypeAlias = Any
"""uint8 [rows, bytes of a row]: numpy on the CPU, a tensor elsewhere. Slicing and assigning are the same for both."""


def view_rect(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    """The view of a rectangle; a one-dimensional tensor counts as N x 1, stacked matrices [E, R, C] as E * R x C."""
    if tensor.dim() == 3:
        tensor = tensor.view(-1, tensor.shape[2])  # a view or an error, never a copy
    if tensor.dim() == 1:
        return tensor[rect.row : rect.row + rect.rows]
    return tensor[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def view_bytes(tensor: torch.Tensor) -> ByteMatrix:
    """The tensor's bytes as uint8 [rows, cols * itemsize], a view: what is written there is written to the tensor.

    On the CPU it is a numpy array, whose slices cost a tenth of a tensor's. Raises ValueError where a row's values do not lie side by
    side, or (RuntimeError) stacked matrices not one below the other.
    """
    matrix = tensor.detach()
    if matrix.dim() == 1:
        matrix = matrix.unsqueeze(1)
    elif matrix.dim() == 3:
        matrix = matrix.view(-1, matrix.shape[2])  # stacked matrices, as in `view_rect`; a view or an error, never a copy
    if matrix.dim() != 2 or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has no rows of bytes")
    rows = matrix.view(torch.uint8)
    return rows if rows.is_cuda else rows.numpy()


def as_byte_matrix(flat: torch.Tensor) -> ByteMatrix:
    """A flat uint8 buffer in the same form."""
    return flat if flat.is_cuda else flat.numpy()


class Hash:
    """128 bits of XXH3 over the bytes it is given, piece by piece. Of bytes on a GPU it hashes what `device_digest` makes of them there:
    another digest than the host's of the same bytes, so both sides must hold them on the same kind of device."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._pending: list[torch.Tensor] = []

    def update(self, matrix: ByteMatrix) -> None:
        """uint8 [rows, bytes of a row]. On a GPU this only starts the work, on the current stream."""
        if isinstance(matrix, np.ndarray):
            self._state.update(np.ascontiguousarray(matrix).data)
            return
        from parallel.digest_triton import run_sums

        self._state.update(matrix.numel().to_bytes(8, "little"))
        self._pending.append(run_sums(matrix.contiguous().view(-1)))

    def hexdigest(self) -> str:
        """32 hex digits; on a GPU, waits for the work there."""
        if self._pending:
            self._state.update(torch.cat(self._pending).cpu().numpy().data)
            self._pending.clear()
        return self._state.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes as uint8 [numel * itemsize]; shares memory where the tensor is contiguous and on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def digest(tensor: torch.Tensor, rect: Rect) -> str:
    """`Hash` of a rectangle's raw bytes in row order. Detects corruption; it is no cryptographic hash."""
    return _started(tensor, rect).hexdigest()


def digest_all(tensors: Mapping[str, torch.Tensor], named_rects: Sequence[NamedRect]) -> list[str]:
    """`digest` of every named_rect, in order. On the host, on all cores this process may use: XXH3 runs outside Python's lock."""
    if any(tensor.is_cuda for tensor in tensors.values()):
        started = [_started(tensors[name], rect) for name, rect in named_rects]  # all work is under way before the first is waited for
        return [each.hexdigest() for each in started]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda named_rect: digest(tensors[named_rect[0]], named_rect[1]), named_rects))


def _started(tensor: torch.Tensor, rect: Rect) -> Hash:
    found = Hash()
    if tensor.is_cuda:
        found.update(view_rect(tensor, rect).detach().contiguous().reshape(-1).view(torch.uint8))
    else:
        found.update(raw_bytes(view_rect(tensor, rect)))
    return found
