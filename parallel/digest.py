"""Access to rectangles of real tensors, for trainer and engine alike: views, raw bytes and digests."""

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
"""uint8 [rows, bytes of a row]: a numpy array on the CPU, else a tensor. Both support the same slicing and assignment."""


def make_stored_tensors(shards: Iterable[Shard], format_of: FormatOf) -> dict[str, torch.Tensor]:
    """Allocate zero-filled tensors that store some shards: values and scales, by name."""
    stored = list_stored_tensors(shards, format_of)
    return {name: torch.zeros(shape, dtype=getattr(torch, format.dtype)) for name, (format, shape) in stored.items()}


def view_rect(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    """Return a view of a rectangle. A one-dimensional tensor counts as N x 1, stacked matrices [E, R, C] count as E * R x C."""
    if tensor.dim() == 3:
        tensor = tensor.view(-1, tensor.shape[2])  # a view or an error, never a copy
    if tensor.dim() == 1:
        return tensor[rect.row : rect.row + rect.rows]
    return tensor[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def view_bytes(tensor: torch.Tensor) -> ByteMatrix:
    """Return a writable view of the tensor's bytes as uint8 [rows, cols * itemsize]. On the CPU it is a numpy array, whose slices cost a
    tenth of a tensor's. Raises ValueError if the values of a row are not contiguous, and RuntimeError if stacked matrices are not."""
    matrix = tensor.detach()
    if matrix.dim() == 1:
        matrix = matrix.unsqueeze(1)
    elif matrix.dim() == 3:
        matrix = matrix.view(-1, matrix.shape[2])
    if matrix.dim() != 2 or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has no contiguous rows")
    return as_byte_matrix(matrix.view(torch.uint8))


def as_byte_matrix(values: torch.Tensor) -> ByteMatrix:
    """Return a uint8 tensor, flat or a matrix, as numpy array on the CPU and as tensor elsewhere, without a copy."""
    return values.numpy() if values.device.type == "cpu" else values


class Hash:
    """128-bit XXH3 hash, not cryptographic; on a GPU of `digest_triton`'s sums, so both sides of a comparison need the same kind of
    device."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._pending: list[torch.Tensor] = []

    def update(self, matrix: ByteMatrix) -> None:
        """Add uint8 [rows, bytes of a row]. On a GPU this only launches the work on the current stream."""
        if isinstance(matrix, np.ndarray):
            self._state.update(np.ascontiguousarray(matrix).data)
            return
        from parallel.digest_triton import run_sums

        self._state.update(matrix.numel().to_bytes(8, "little"))
        self._pending.append(run_sums(matrix.contiguous().view(-1)))

    def hexdigest(self) -> str:
        """Return 32 hex digits. Waits for the GPU's work."""
        if self._pending:
            self._state.update(torch.cat(self._pending).cpu().numpy().data)
            self._pending.clear()
        return self._state.hexdigest()


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes in row order as uint8 [numel * itemsize] on its device. Shares memory if the tensor is contiguous."""
    values = tensor.detach().contiguous()
    # as_strided, because contiguous() keeps any stride of a one-element tensor, which view(torch.uint8) refuses
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return `flat_bytes` on the CPU as a numpy array."""
    return flat_bytes(tensor).cpu().numpy()


def digest(tensor: torch.Tensor, rect: Rect) -> str:
    """Return the `Hash` of a rectangle's raw bytes in row order."""
    return _start_hash(tensor, rect).hexdigest()


def digest_all(tensors: Mapping[str, torch.Tensor], named_rects: Sequence[NamedRect]) -> list[str]:
    """Return the `digest` of every rectangle, in order. On the CPU it uses all cores of this process: XXH3 releases the GIL."""
    if any(tensor.is_cuda for tensor in tensors.values()):
        hashes = [_start_hash(tensors[name], rect) for name, rect in named_rects]  # launches all work before waiting for the first
        return [each.hexdigest() for each in hashes]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda named_rect: digest(tensors[named_rect[0]], named_rect[1]), named_rects))


def _start_hash(tensor: torch.Tensor, rect: Rect) -> Hash:
    rect_hash, values = Hash(), view_rect(tensor, rect)
    rect_hash.update(flat_bytes(values) if tensor.is_cuda else raw_bytes(values))
    return rect_hash
