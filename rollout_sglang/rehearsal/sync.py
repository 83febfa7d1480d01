"""The receiving side of a sync without data: unpacks chunks as `WeightReceiver` does, and counts the writes of every byte."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.chunking import Chunk
from parallel.transport.pack import check_targets, make_target_packer

_Box = tuple[int, int, int, int]
"""(first row, row after the last, first byte of a row, byte after the last)"""


def receive(live: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]) -> None:
    """Unpack one sync into `live`, tensors on device `meta`. Raise ValueError with the tensor's name if a chunk does not fit, or if a byte
    is not written exactly once."""
    packer, writes = make_target_packer(live, chunks), _Writes()
    check_targets(packer, chunks)
    with torch.inference_mode(), writes:
        for chunk in chunks:
            packer.unpack(chunk.targets, torch.empty(chunk.nbytes, dtype=torch.uint8, device="meta"), hashing=False)
    for name, tensor in live.items():
        if fault := _find_miscounted(tensor, writes.by_storage[tensor.untyped_storage()._cdata]):
            raise ValueError(f"{name}: {fault}")


def without_device(live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the fake device as tensors on `meta` with the same storages."""
    return {
        name: torch.empty(0, dtype=each.dtype, device="meta").set_(each.untyped_storage(), each.storage_offset(), each.shape, each.stride())
        for name, each in live.items()
    }


class _Writes(TorchDispatchMode):
    """Mode that records copies into uint8 matrices as (first byte, rows, bytes per row) by storage."""

    def __init__(self) -> None:
        super().__init__()
        self.by_storage: dict[int, list[tuple[int, int, int]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            rows, columns = args[0].shape
            self.by_storage[args[0].untyped_storage()._cdata].append((int(args[0].storage_offset()), rows, columns))
        return func(*args, **(kwargs or {}))


def _find_miscounted(tensor: torch.Tensor, writes: Sequence[tuple[int, int, int]]) -> str:
    """Return which bytes were not written exactly once, or "". `writes` are (first byte in the storage, rows, bytes per row)."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    width = tensor.shape[-1] * size if tensor.dim() > 1 else size
    pitch = tensor.stride(-2 if tensor.dim() > 1 else 0) * size
    boxes: list[_Box] = [(0, tensor.nbytes // width, 0, width)]
    for offset, rows, columns in writes:
        row, column = divmod(offset - start, pitch)
        boxes.append((row, row + rows, column, column + columns))
    edges = [np.unique([edge for box in boxes for edge in box[axis : axis + 2]]) for axis in (0, 2)]
    counts = np.zeros([len(axis) - 1 for axis in edges], np.int64)
    for box in boxes[1:]:
        top, bottom, left, right = (int(np.searchsorted(edges[at // 2], edge)) for at, edge in enumerate(box))
        counts[top:bottom, left:right] += 1
    wrong = np.argwhere(counts != 1)
    if not len(wrong):
        return ""
    row, column = wrong[0]
    where = f"row {edges[0][row]}, bytes {edges[1][column]}..{edges[1][column + 1] - 1}"
    return f"a sync writes {where} {counts[row, column]} times, not once"
