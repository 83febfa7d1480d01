"""Tensors of gpt-oss's experts, which a checkpoint stores for all experts of a layer together. A tensor named `STACK.N` is part N of the
stored tensor STACK:

    gate_up_proj [E, H, 2 I], down_proj [E, I, H]              matrices, transposed: [in, out] instead of [out, in]
    gate_up_proj_bias [E, 2 I], down_proj_bias [E, H]
    gate_up_proj_blocks [E, 2 I, H / 32, 16], ..._scales       the matrices in MXFP4 instead, not transposed

MXFP4 (OCP Microscaling Formats 1.0): 32 numbers of a row are 16 bytes, the first number in the low bits, and share a scale 2^(byte - 127).
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.hf.checkpoint_format import find_stack

_GROUP = 32  # numbers with one scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 0 to 7; 8 to 15 are negative


def join_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as a checkpoint stores them: parts are stacked, in the order of their numbers. All parts of a stack must be given."""
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    result = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if (place := find_stack(name)) is None:
            result[name] = tensor
        else:
            stacks.setdefault(place[0], {})[place[1]] = tensor.t()  # of a vector, itself
    return result | {name: torch.stack([parts[number] for number in sorted(parts)]) for name, parts in stacks.items()}


class PartSlice:
    """Stands in for safetensors' slice of a part."""

    def __init__(self, stack: Any, part: int) -> None:
        self._stack, self._part = stack, part

    def get_shape(self) -> list[int]:
        return list(self._stack.get_shape()[:0:-1])

    def get_dtype(self) -> str:
        return str(self._stack.get_dtype())

    def __getitem__(self, key: Any) -> torch.Tensor:
        key = key if isinstance(key, tuple) else (key,)
        return self._stack[(slice(self._part, self._part + 1), *key[::-1])][0].t()


class Mxfp4Slice:
    """Stands in for safetensors' slice of a part in MXFP4: its values in BF16, which holds them exactly."""

    def __init__(self, blocks: Any, scales: Any, part: int) -> None:
        self._blocks, self._scales, self._part = blocks, scales, part

    def get_shape(self) -> list[int]:
        _, rows, groups, _ = self._blocks.get_shape()
        return [rows, groups * _GROUP]

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, cols = key if isinstance(key, tuple) else (key, slice(None))
        first, last, _ = cols.indices(self.get_shape()[1])
        groups, part = slice(first // _GROUP, -(-last // _GROUP)), slice(self._part, self._part + 1)
        blocks, scales = self._blocks[part, rows, groups][0], self._scales[part, rows, groups][0]
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [rows, groups, 32]
        values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])[codes.long()]
        whole = torch.ldexp(values, (scales.int() - 127).unsqueeze(-1)).flatten(1)
        return whole[:, first - groups.start * _GROUP : last - groups.start * _GROUP].bfloat16()


class ExpertSlice:
    """Stands in for safetensors' slice of an expert's matrix in a stack of all experts: gate_up_proj [E, 2I, H], down_proj [E, H, I]."""

    def __init__(self, stack: Any, expert: str, part: str) -> None:
        self._stack, self._expert, shape = stack, int(expert), stack.get_shape()
        self._rows, self._cols = (shape[-2] if part == "down" else shape[-2] // 2), shape[-1]
        self._first = self._rows if part == "up" else 0

    def get_shape(self) -> list[int]:
        return [self._rows, self._cols]

    def get_dtype(self) -> str:
        return str(self._stack.get_dtype())

    def __getitem__(self, key: Any) -> torch.Tensor:
        rows, *cols = key if isinstance(key, tuple) else (key,)
        start, end, _ = rows.indices(self._rows)
        return self._stack[(slice(self._expert, self._expert + 1), slice(self._first + start, self._first + end), *cols)][0]
