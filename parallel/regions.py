"""Rectangles of real tensors: a view, its raw bytes, its digest. Trainer and engine both look at memory through these functions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import xxhash

from parallel.geometry import Rect

Place = tuple[str, Rect]
"""A rectangle of a named tensor."""


def region(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    """The view of a rectangle; a one-dimensional tensor counts as N x 1."""
    if tensor.dim() == 1:
        return tensor[rect.row : rect.row + rect.rows]
    return tensor[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def byte_region(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    """The rectangle's bytes as a uint8 view [rows, cols * itemsize] into the tensor: what is written there is written to the tensor.

    Raises ValueError where the rectangle lies outside, or where a row's values do not lie side by side.
    """
    matrix = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
    if matrix.dim() != 2 or (matrix.shape[1] > 1 and matrix.stride(1) != 1):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has no rows of bytes")
    view = region(matrix, rect)
    if min(rect.row, rect.col) < 0 or view.shape != (rect.rows, rect.cols):
        raise ValueError(f"{rect} lies outside a tensor of shape {list(tensor.shape)}")
    return view.view(torch.uint8)


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes as uint8 [numel * itemsize]; shares memory where the tensor is contiguous and on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def digest(tensor: torch.Tensor, rect: Rect) -> str:
    """128-bit XXH3 of a rectangle's raw bytes in row order, as 32 hex digits. Detects corruption; it is no cryptographic hash."""
    return xxhash.xxh3_128_hexdigest(raw_bytes(region(tensor, rect)).data)


def digests(tensors: Mapping[str, torch.Tensor], places: Sequence[Place]) -> list[str]:
    """`digest` of every place, in order, on all cores this process may use: XXH3 runs outside Python's lock."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda place: digest(tensors[place[0]], place[1]), places))


def joint_digest(tensors: Mapping[str, torch.Tensor], places: Iterable[Place]) -> str:
    """One digest over the bytes of all places, one after the other: as if they lay in one buffer."""
    state = xxhash.xxh3_128()
    for name, rect in places:
        state.update(raw_bytes(region(tensors[name], rect)).data)
    return state.hexdigest()
