"""Whether the trainer's weights are the checkpoint's, by name. A sync compares the engine's bytes with the trainer's, and the names on both
sides of each pair, so values that were loaded under another name pass both. Before a run's first sync, each rank reads a share of every
tensor from the checkpoint's files again, where possible without the code that loads it, and compares bytes."""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.distributed import errors_on_all_ranks
from megatron_rl.errors import RunError
from megatron_rl.hf.files import SINGLE, read_index
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import quantize
from megatron_rl.sync.plan import SyncPlan
from parallel.digest import view_rect
from parallel.formats import TensorFormat
from parallel.reshard import get_scale_rect
from parallel.shards import HFTensor, Rect, Region

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACKS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_NOT_STORED = frozenset({"lora", "kv_scales"})  # roles that no checkpoint of a base model holds
_WHOLE = 1 << 16  # the largest number of values of a region that are all compared
_PLACES = 2  # blocks of the engine's format, or else rows, that are compared of a larger region


class LoadedValues:
    """The comparison of a new run's weights with its checkpoint. Each rank reads its own share; nothing is sent."""

    def __init__(self, plan: SyncPlan, rank: int, folder: Path, hf_config: Mapping[str, Any], notify: Callable[[str], None]) -> None:
        self._plan, self._rank, self._folder, self._notify = plan, rank, folder, notify
        self._checkpoint, self._index = HFCheckpoint(folder, hf_config), read_index(folder, "model.path")
        self._files: dict[str, tuple[Any, frozenset[str]]] = {}

    def check(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        """Compare a share of every region of this rank's tensors. Raise RunError on every rank for the first place that holds other bytes
        than the precision contract makes of the checkpoint's values of that name. Collective."""
        places = 0
        with errors_on_all_ranks():
            for shard in self._plan.sources[self._rank]:
                if shard.role in _NOT_STORED:
                    continue
                format = self._plan.contract.format_of(shard.role)
                for region in shard.regions:
                    for part in _choose_parts(region, format):
                        self._compare(named_tensors, shard.name, region, part, format)
                        places += 1
        self._notify(f"{places} places of rank {self._rank}'s weights hold the checkpoint's values of the same name")

    def _compare(self, named_tensors: Mapping[str, torch.Tensor], name: str, region: Region, part: Rect, format: TensorFormat) -> None:
        tensor, (row, col, *_), first_row, first_col = region
        own = part._replace(row=part.row - row + first_row, col=part.col - col + first_col)
        live = view_rect(named_tensors[name], own)
        expected, same = self._read(tensor, part, format, live.device), True
        if isinstance(expected, QuantizedWeight):
            scale = view_rect(named_tensors[format.scale_name(name)], get_scale_rect(own, format))
            same = torch.equal(scale, expected.scale)
            expected, live = expected.data.view(torch.uint8), live.contiguous().view(torch.uint8)
        if not same or not torch.equal(live.reshape(expected.shape).to(expected.dtype), expected):
            place = f"the checkpoint's {tensor.name} from row {part.row}, column {part.col}"
            raise RunError(f"the sync is not proved: {name} of trainer rank {self._rank} should hold {place}, but the values differ")

    def _read(self, tensor: HFTensor, part: Rect, format: TensorFormat, device: torch.device) -> torch.Tensor | QuantizedWeight:
        """Return what the contract makes of a rectangle of the checkpoint."""
        contract, stored = self._plan.contract, self._checkpoint.find_format(tensor)
        if format.quantized and stored is not None and stored.name == contract.trainer_format.name:  # the trainer adopts the blocks
            data, scale = (
                self._read_stored(name, rect, tensor)
                for name, rect in ((tensor.name, part), (format.scale_name(tensor.name), get_scale_rect(part, format)))
            )
            if data is None or scale is None:
                data, scale = self._checkpoint.read_blocks(Region(tensor, part))
            return QuantizedWeight(data.to(device), scale.to(device, getattr(torch, format.scale_dtype)))
        whole = part if not format.block or format.block[1] else part._replace(col=0, cols=tensor.cols)  # a row shares a scale
        values = self._read_stored(tensor.name, whole, tensor) if stored is None else None
        values = (self._checkpoint.read_values(Region(tensor, whole)) if values is None else values).to(device)
        if not format.quantized:
            return values.to(getattr(torch, format.dtype))
        if not contract.trainer_format.quantized:  # the blocks are made of the trainer's parameters
            values = values.to(getattr(torch, contract.high_format.dtype))
        blocks = quantize(values, format)
        return blocks._replace(data=blocks.data[:, part.col - whole.col :][:, : part.cols].contiguous())

    def _read_stored(self, name: str, rect: Rect, tensor: HFTensor) -> torch.Tensor | None:
        """Return a rectangle of a tensor that is stored by its name or in transformers' stack of a layer's experts, or else None."""
        row, col, rows, cols = rect
        columns = (slice(col, col + cols),) * (not tensor.vector)
        if (view := self._find(name)) is not None:
            middle = (slice(None),) * (len(tensor.shape) - 2)
            values: torch.Tensor = view[(slice(row, row + rows), *middle, *columns)]
            return values.squeeze(1) if middle else values
        match = _EXPERT.fullmatch(name)
        stack = self._find(f"{match[1]}.{_STACKS[match[3]]}") if match else None
        if match is None or stack is None:
            return None
        expert, first = int(match[2]), row + tensor.rows * (match[3] == "up")
        stacked: torch.Tensor = stack[(slice(expert, expert + 1), slice(first, first + rows), *columns)]
        return stacked[0]

    def _find(self, name: str) -> Any | None:
        """Return safetensors' slice of a stored tensor, or None."""
        file = self._index.get(name, "") if self._index else SINGLE
        if file and file not in self._files:
            opened = safe_open(self._folder / file, framework="pt")
            self._files[file] = opened, frozenset(opened.keys())
        return self._files[file][0].get_slice(name) if file and name in self._files[file][1] else None


def _choose_parts(region: Region, format: TensorFormat) -> Iterator[Rect]:
    """Yield the rectangles of a region to compare: whole blocks, or whole rows of it, at places that a hash chooses."""
    row, col, rows, cols = region.tensor_rect
    if rows * cols <= _WHOLE:
        yield region.tensor_rect
        return
    height, width = format.block or (1, 0)
    for number in range(_PLACES):
        chosen = zlib.crc32(f"{region.tensor.name} {row} {col} {number}".encode())
        down, right = chosen % -(-rows // height) * height, (chosen >> 16) % -(-cols // width) * width if width else 0
        yield Rect(row + down, col + right, min(height, rows - down), min(width or cols, cols - right))
