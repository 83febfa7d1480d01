"""Initial FP32 masters (`precision.masters`) of weights whose copy in the policy is coarser than the master.

- A quantized layer's master is drawn when its optimizer takes its slice. With `high = "fp32"`, a parameter that only the engine quantizes
  is its own master and is spread when it is read.
- A BF16 parameter keeps the checkpoint's value; the optimizer's master is spread (`spread_optimizer`).

A master depends only on its position in the checkpoint, so a rank draws those of its own shards, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_rl.config import Config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.mcore.base.master_slices import flatten_chained, iter_stepped
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.masters import hash_places, spread, spread_blocks, spread_within_blocks
from megatron_rl.precision.quantized_weight import QuantizedWeight
from parallel.formats import TensorFormat
from parallel.shards import Rect, Region, Shard

_STRIP = 1 << 22  # number of elements drawn at a time


class MasterSpread(NamedTuple):
    """Draws masters from a seed, for the weights that a contract quantizes."""

    seed: int
    contract: PrecisionContract

    @classmethod
    def from_config(cls, config: Config) -> MasterSpread | None:
        """Return None if masters are the checkpoint's stored values."""
        contract = PrecisionContract.from_config(config.precision)
        return cls(config.train.seed, contract) if config.precision.masters == "spread" else None

    def read(self, checkpoint: HFCheckpoint, region: Region, into: torch.Tensor) -> None:
        """Fill `into` [rows, cols] with masters of a region. Quantizing them gives the same blocks as the checkpoint's values. Reads whole
        blocks of the tensor, since the maximum of a block depends on all of it."""
        tensor, rect, *_ = region
        format = self.contract.format_of(tensor.role)
        whole = _grow_to_blocks(region, format)
        columns = slice(rect.col - whole.col, rect.col - whole.col + rect.cols)
        for first, last in _cut_rows(whole.row, whole.row + whole.rows, whole.cols, format):
            strip = whole._replace(row=first, rows=last - first)
            values = checkpoint.read_values(Region(tensor, strip)).to(into.device)
            masters = spread_within_blocks(values, hash_places(self.seed, tensor.name, strip, into.device), format)
            start, end = max(first, rect.row), min(last, rect.row + rect.rows)
            into[start - rect.row : end - rect.row] = masters[start - first : end - first, columns]

    def draw_for_blocks(self, shard: Shard, blocks: QuantizedWeight, format: TensorFormat) -> torch.Tensor:
        """Return float32 masters [N, K] for the blocks of a shard; rows of both are in quantized order."""
        assert format.block is not None
        height, masters = format.block[0], torch.empty(blocks.data.shape, device=blocks.data.device)
        for first, last in _cut_rows(0, len(masters), masters.shape[1], format):
            part = QuantizedWeight(blocks.data[first:last], blocks.scale[first // height : -(-last // height)])
            masters[first:last] = spread_blocks(part, self._hash_rows(shard, first, last, masters.device), format)
        return masters

    def spread_optimizer(self, optimizer: Any, shards: Sequence[Shard], parameters: Mapping[str, torch.Tensor]) -> None:
        """Spread the optimizer's separate masters of 16-bit parameters: the slices that this rank updates."""
        shard_of = {id(parameters[shard.name]): shard for shard in shards}
        for part in flatten_chained(optimizer):
            for parameter, master in iter_stepped(part):
                if parameter.itemsize == 2 and master.values.numel():
                    self._spread_slice(shard_of[id(parameter)], parameter.detach(), master.values.detach(), master.start)

    def _spread_slice(self, shard: Shard, parameter: torch.Tensor, master: torch.Tensor, start: int) -> None:
        """Fill the slice of a parameter's master that starts at flat element `start`."""
        end, cols = start + master.numel(), shard.cols
        for first, last in _cut_rows(start // cols, -(-end // cols), cols):
            low, high = max(start, first * cols), min(end, last * cols)
            places = self._hash_rows(shard, first, last, master.device).view(-1)[low - first * cols : high - first * cols]
            master.view(-1)[low - start : high - start] = spread(parameter.view(-1)[low:high], places)

    def _hash_rows(self, shard: Shard, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Return `hash_places` for rows of a shard, int32 [last - first, cols]; 0 for padding."""
        places = torch.zeros(last - first, shard.cols, dtype=torch.int32, device=device)
        for tensor, rect, row, col in shard.regions:
            start, end = max(first, row), min(last, row + rect.rows)
            if start < end:
                part = rect._replace(row=rect.row + start - row, rows=end - start)
                places[start - first : end - first, col : col + rect.cols] = hash_places(self.seed, tensor.name, part, device)
        return places


def _grow_to_blocks(region: Region, format: TensorFormat) -> Rect:
    """Return the smallest rectangle of whole blocks that contains the region."""
    assert format.block is not None
    tensor, (row, col, rows, cols), *_ = region
    height, width = format.block[0], format.block[1] or tensor.cols
    top, left = row - row % height, col - col % width
    bottom, right = min(-(-(row + rows) // height) * height, tensor.rows), min(-(-(col + cols) // width) * width, tensor.cols)
    return Rect(top, left, bottom - top, right - left)


def _cut_rows(first: int, end: int, cols: int, format: TensorFormat | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of row ranges of about `_STRIP` elements; of whole blocks if a format is given."""
    height = format.block[0] if format and format.block else 1
    step = max(_STRIP // cols // height, 1) * height
    return ((row, min(row + step, end)) for row in range(first, end, step))
