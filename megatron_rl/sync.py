"""The sync: the trainer's blocks go to the live engine as bytes, and every sync proves that they arrived.

Nothing is dequantised, cast or quantised on the way. All trainer ranks write their rectangles of a bucket into one shared-memory
file, the engine copies it into its live parameters, and so on, bucket by bucket; so the extra memory is one bucket. Then the proof:
every rectangle of the plan is hashed where it came from, in the trainer's live tensors, and where it went to, in the engine's.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.engine import Engine
from megatron_rl.errors import RunError, UserError
from megatron_rl.ranks import on_rank0
from megatron_rl.sync_plan import SyncPlan
from parallel.blocks import BLOCK
from parallel.buckets import Bucket, Slice, part_of
from parallel.geometry import Rect
from parallel.plan import Move
from parallel.regions import digest, region

_SHARED_MEMORY = Path("/dev/shm")
_HEADROOM = 16 << 20


@dataclass(frozen=True)
class SyncReport:
    """What one sync did: bytes and FP8 blocks moved, engine tensors (scales count) written, seconds in all and of the proof.

    All rectangles of the `proved` tensors had equal digests on both sides, or the sync would have raised.
    """

    bytes: int
    blocks: int
    tensors: int
    proved: int
    seconds: float
    proof_seconds: float

    def metrics(self) -> dict[str, float]:
        """By the names of the run log."""
        counts = {"sync/bytes": self.bytes, "sync/blocks": self.blocks, "sync/tensors": self.tensors, "sync/proved": self.proved}
        return {name: float(value) for name, value in counts.items()} | {
            "time/sync": self.seconds - self.proof_seconds,
            "time/proof": self.proof_seconds,
        }


class WeightSync:
    """Runs syncs over a plan. Every trainer rank makes one; only rank 0 has the engine. All its methods are collective."""

    def __init__(self, plan: SyncPlan, engine: Engine | None, read_planes: Callable[[], dict[str, torch.Tensor]]) -> None:
        """`read_planes` gives this rank's live tensors (`mcore.weights.planes`), as the last optimizer step left them."""
        self.plan, self._read_planes = plan, read_planes
        self._engine = cast(Engine, engine)  # used inside on_rank0 only
        self._rank = dist.get_rank()
        self._segment = Path(on_rank0(lambda: _make_segment(plan.bucket_bytes)))  # every rank must open the same file

    def close(self) -> None:
        """Removes the shared-memory file."""
        if self._rank == 0:
            self._segment.unlink(missing_ok=True)

    def run(self, version: int) -> SyncReport:
        """Moves the trainer's weights into the engine as policy version `version`, then proves it.

        Raises RunError naming parameter, rank and first block when a byte differs, or when the engine fails.
        """
        start = time.perf_counter()
        planes = self._read_planes()
        on_rank0(lambda: self._engine.begin_sync())
        for bucket in self.plan.buckets:
            self._write_mine(planes, bucket)
            dist.barrier()
            on_rank0(partial(self._write_to_engine, bucket))
        on_rank0(lambda: self._engine.end_sync(version))
        moved = time.perf_counter()
        proved = self.prove(planes)
        end = time.perf_counter()
        plan = self.plan
        blocks = sum(move.target_rect.rows * move.target_rect.cols for move in plan.moves if move.kind == "scale")
        tensors = len({(move.target_rank, move.target) for move in plan.moves})
        return SyncReport(sum(map(plan.bytes_of, plan.moves)), blocks, tensors, proved, end - start, end - moved)

    def _write_to_engine(self, bucket: Bucket) -> None:
        self._engine.write(self._segment, bucket)

    def _write_mine(self, planes: dict[str, torch.Tensor], bucket: Bucket) -> None:
        """Writes this rank's rectangles of a bucket into the segment."""
        wanted: dict[tuple[int, str], list[Slice]] = defaultdict(list)
        for piece in bucket:
            wanted[piece.plane.rank, piece.plane.name].append(piece)
        with open(self._segment, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            flat = np.frombuffer(memory, np.uint8)
            for move in self.plan.moves:
                if move.source_rank == self._rank:
                    for piece in wanted.get((move.target_rank, move.target), ()):
                        _write_part(planes[move.source], move, piece, flat)
            del flat  # the map cannot be closed while an array looks into it

    def prove(self, planes: dict[str, torch.Tensor] | None = None) -> int:
        """Compares the digests of every move at its source and at its target; returns the number of engine tensors proved.

        Raises RunError at the first difference, naming parameter, rank and first block.
        """
        planes = planes or self._read_planes()
        mine = {
            index: digest(planes[move.source], move.source_rect)
            for index, move in enumerate(self.plan.moves)
            if move.source_rank == self._rank
        }
        gathered: list[dict[int, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        sent = {index: value for part in gathered if part for index, value in part.items()}
        arrived = on_rank0(lambda: _engine_digests(self._engine, self.plan.moves))
        for index, move in enumerate(self.plan.moves):
            if sent[index] != arrived[index]:
                self._raise_difference(planes, move)
        return len({(move.target_rank, move.target) for move in self.plan.moves})

    def _raise_difference(self, planes: dict[str, torch.Tensor], move: Move) -> None:
        """Finds the first block of a move that differs, by hashing its blocks one by one on both sides."""
        offsets = list(_tiles(move))
        mine: list[list[str]] = [[]]
        if self._rank == move.source_rank:
            mine = [[digest(planes[move.source], _shift(tile, move.source_rect)) for tile in offsets]]
        dist.broadcast_object_list(mine, src=move.source_rank)

        def first_difference() -> Rect:
            wanted = [(move.target, _shift(tile, move.target_rect)) for tile in offsets]
            theirs = self._engine.digests({move.target_rank: wanted})[move.target_rank]
            return next((tile for tile, a, b in zip(offsets, mine[0], theirs, strict=True) if a != b), offsets[0])

        tile = _shift(on_rank0(first_difference), move.target_rect)
        raise RunError(
            f"the sync is not proved: {move.target} of engine rank {move.target_rank} differs from {move.source} of trainer rank "
            f"{move.source_rank}; first in rows {tile.row}..{tile.row + tile.rows - 1}, "
            f"columns {tile.col}..{tile.col + tile.cols - 1} ({move.kind})"
        )


def _make_segment(size: int) -> str:
    """Creates the shared-memory file, readable by this user only, and returns its path. Raises UserError where it does not fit."""
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free < size + _HEADROOM:
        rule = f"{_SHARED_MEMORY} has {free >> 20} MiB free"
        raise UserError("sync.bucket_mb", size >> 20, rule, "lower it, or enlarge the shared memory")
    path = _SHARED_MEMORY / f"megatron-rl-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(size, 1))
    finally:
        os.close(descriptor)
    return str(path)


def _write_part(source: torch.Tensor, move: Move, piece: Slice, flat: np.ndarray) -> None:
    part = part_of(move, piece)
    if part is None:
        return
    from_rect, to_rect = part
    values = region(source, from_rect).contiguous()
    size = piece.plane.itemsize
    if values.element_size() != size:
        raise AssertionError(f"{move.source} has {values.element_size()} bytes an element, the engine's {move.target} has {size}")
    target = flat[piece.offset : piece.offset + piece.nbytes].reshape(piece.rows, piece.row_bytes)
    window = target[to_rect.row : to_rect.row + to_rect.rows, to_rect.col * size : (to_rect.col + to_rect.cols) * size]
    window[:] = values.view(torch.uint8).reshape(window.shape).cpu().numpy()


def _engine_digests(engine: Engine, all_moves: Sequence[Move]) -> list[str]:
    """The engine's digest of every move's target rectangle, in the order of the moves."""
    wanted: dict[int, list[tuple[str, Rect]]] = defaultdict(list)
    for move in all_moves:
        wanted[move.target_rank].append((move.target, move.target_rect))
    found = {rank: iter(values) for rank, values in engine.digests(wanted).items()}
    return [next(found[move.target_rank]) for move in all_moves]


def _tiles(move: Move) -> list[Rect]:
    """A move cut into FP8 blocks (or, for scales, single values), told from the move's own corner."""
    step = 1 if move.kind == "scale" else BLOCK
    rect = move.target_rect
    return [
        Rect(row, col, min(step, rect.rows - row), min(step, rect.cols - col))
        for row in range(0, rect.rows, step)
        for col in range(0, rect.cols, step)
    ]


def _shift(tile: Rect, corner: Rect) -> Rect:
    return Rect(corner.row + tile.row, corner.col + tile.col, tile.rows, tile.cols)
