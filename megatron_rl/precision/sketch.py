"""Sketches of activations: a few numbers per token that ranks can add up, however a tensor is sharded.

Let x be a token's values and c(j) the number of the j-th column in the whole tensor. The sketch of x holds

    digest      sum over j of bits(x_j) w(c(j)) mod 2^64, with odd pseudorandom 64-bit weights w: equal for equal values
    count       number of columns
    norm        sum over j of x_j^2
    projections sum over j of x_j s_k(c(j)) for k = 1 ... 16, with pseudorandom signs s_k

The squared difference of two tokens' projections, averaged over k, estimates |x - y|^2 with a relative standard deviation of sqrt(2 / 16)
(Achlioptas, Database-friendly random projections, 2003). Digests detect accidents, not attacks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import safetensors.torch
import torch

from megatron_rl.precision.graph.reader import dtype_name

PROJECTIONS = 16
MAX_KEPT_BYTES = 1 << 30
"""Bytes of activations that a recorder keeps, so that the values of a token that differs can be shown. Later ones are only sketched."""
_MIXERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of SplitMix64


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _hash(columns: torch.Tensor) -> torch.Tensor:
    """Return pseudorandom int64 of int64 column numbers (SplitMix64)."""
    z = (columns + 1) * _signed(_MIXERS[0])
    for shift, factor in ((30, _MIXERS[1]), (27, _MIXERS[2])):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


class Sketch(NamedTuple):
    """Sketches of rows."""

    exact: torch.Tensor  # int64 [rows, 2]: digest, count
    moments: torch.Tensor  # float64 [rows, 1 + PROJECTIONS]: norm, projections

    @classmethod
    def of(cls, x: torch.Tensor, columns: torch.Tensor) -> Sketch:
        """Return the sketches of x `[rows, n]`, whose columns have these numbers, int64 `[n]`, in the whole tensor. On the CPU."""
        hashes = _hash(columns.to(x.device))
        bits = (x.float() + 0.0).contiguous().view(torch.int32).long()  # + 0.0: -0 and 0 are the same number
        digests = (bits * (hashes | 1)).sum(-1)
        signs = 1.0 - 2.0 * ((hashes[:, None] >> torch.arange(16, 16 + PROJECTIONS, device=x.device)) & 1).double()
        wide = x.double()
        moments = torch.cat([wide.square().sum(-1, keepdim=True), wide @ signs], -1)
        return cls(torch.stack([digests, torch.full_like(digests, len(columns))], -1).cpu(), moments.cpu())

    @classmethod
    def zeros(cls, rows: int) -> Sketch:
        return cls(torch.zeros(rows, 2, dtype=torch.int64), torch.zeros(rows, 1 + PROJECTIONS, dtype=torch.float64))


@dataclass
class RecordedTensor:
    """Sketches of one operator's result for the tokens of a sequence. Tokens that were not recorded have count 0."""

    dtype: str
    sketch: Sketch

    def __add__(self, other: RecordedTensor) -> RecordedTensor:
        return RecordedTensor(self.dtype, Sketch(*(a + b for a, b in zip(self.sketch, other.sketch, strict=True))))


Recording = dict[str, RecordedTensor]
"""Operator -> its result, in the order of computation."""


def name_copy(op: str, rank: int) -> str:
    """Return the name under which a rank records a result that it shares with rank 0, whose own has the operator's name."""
    return f"{op}@{rank}" if rank else op


def add_recordings(parts: Sequence[Recording]) -> Recording:
    """Return the recording of a whole model, given those of its ranks."""
    whole: Recording = {}
    for part in parts:
        for op, tensor in part.items():
            whole[op] = whole[op] + tensor if op in whole else tensor
    return whole


def pack_recording(recording: Recording) -> bytes:
    """Return a recording as bytes, in the format of safetensors."""
    tensors = {f"{op}/{part}": values for op, tensor in recording.items() for part, values in tensor.sketch._asdict().items()}
    return safetensors.torch.save(tensors, {"dtypes": json.dumps([(op, tensor.dtype) for op, tensor in recording.items()])})


def unpack_recording(data: bytes) -> Recording:
    """Undo `pack_recording`."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = safetensors.torch.load(data)
    dtypes = json.loads(header["__metadata__"]["dtypes"])
    return {op: RecordedTensor(dtype, Sketch(tensors[f"{op}/exact"], tensors[f"{op}/moments"])) for op, dtype in dtypes}


class Values(NamedTuple):
    """A token's values on one rank, by the number of the column."""

    columns: list[int]
    values: list[float]


@dataclass
class _Part:
    rows: torch.Tensor  # int64 [n], numbers of the recorded rows
    sketch: Sketch
    columns: torch.Tensor
    values: torch.Tensor | None  # [n, columns], None if the budget was spent


@dataclass
class RowRecorder:
    """Records rows of activations: sketches of all, and the values of those that fit into `MAX_KEPT_BYTES`."""

    total: int = 0  # rows of all passes
    _first: int = 0  # of the current pass
    _kept_bytes: int = 0
    _parts: dict[str, list[_Part]] = field(default_factory=dict)
    _dtypes: dict[str, str] = field(default_factory=dict)

    def begin_pass(self, rows: int) -> None:
        """Begin a forward pass of this many rows."""
        self._first, self.total = self.total, self.total + rows

    def add(self, op: str, rows: torch.Tensor, x: torch.Tensor, columns: torch.Tensor) -> None:
        """Record x `[n, c]` for the rows int64 `[n]` of the current pass. `columns`: see `Sketch.of`."""
        keeps = self._kept_bytes + x.nbytes <= MAX_KEPT_BYTES
        self._kept_bytes += x.nbytes * keeps
        part = _Part(rows.cpu() + self._first, Sketch.of(x, columns), columns.cpu(), x.to("cpu", copy=True) if keeps else None)
        self._parts.setdefault(op, []).append(part)
        self._dtypes[op] = dtype_name(x.dtype)

    def select(self, rows: torch.Tensor) -> Recording:
        """Return the recording of a sequence whose tokens are these rows, int64 `[tokens]`; `total` stands for a token without a row."""
        place = torch.full((self.total + 1,), -1).scatter(0, rows, torch.arange(len(rows)))
        recording: Recording = {}
        for op, parts in self._parts.items():
            sketch = Sketch.zeros(len(rows))
            for part in parts:
                places = place[part.rows]
                for whole, own in zip(sketch, part.sketch, strict=True):
                    whole.index_add_(0, places[places >= 0], own[places >= 0])
            recording[op] = RecordedTensor(self._dtypes[op], sketch)
        return recording

    def get_values(self, op: str, row: int) -> Values:
        """Return this rank's values of a row, none if they were not kept."""
        columns, values = list[int](), list[float]()
        for part in self._parts.get(op, []):
            for index in (part.rows == row).nonzero().flatten().tolist() if part.values is not None else ():
                columns += part.columns.tolist()
                values += part.values[index].float().tolist()  # type: ignore[index]
        return Values(columns, values)
