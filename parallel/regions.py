"""Rectangles of real tensors: a view, its raw bytes, its digest. Trainer and engine both hash through `digest`."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from parallel.pieces import Rect


def region(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    """The view of a rectangle; a one-dimensional tensor counts as N x 1, stacked matrices [E, R, C] as E * R x C."""
    if tensor.dim() == 3:
        tensor = tensor.view(-1, tensor.shape[2])  # a view or an error, never a copy
    if tensor.dim() == 1:
        return tensor[rect.row : rect.row + rect.rows]
    return tensor[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes as uint8 [numel * itemsize]; shares memory where the tensor is contiguous and on the CPU."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()


def digest(tensor: torch.Tensor, rect: Rect) -> str:
    """128-bit XXH3 of a rectangle's raw bytes in row order, as 32 hex digits. Detects corruption; it is no cryptographic hash."""
    return xxhash.xxh3_128_hexdigest(raw_bytes(region(tensor, rect)).data)
