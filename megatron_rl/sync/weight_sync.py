"""The sync: the trainer's blocks go to the live engine as bytes, and every sync proves that they arrived.

Nothing is dequantised, cast or quantised on the way. Trainer ranks send chunk by chunk straight to the engine ranks that need them
(`parallel.transport.base`), while the engine answers no request; so the extra memory is two chunks. Every chunk is hashed where it
came from, in the trainer's live tensors, and where it went to, in the engine's.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from megatron_rl.config.sync import Sync
from megatron_rl.distributed import gathered, on_rank0
from megatron_rl.errors import LostError, RunError
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.transport_check import check_hosts
from parallel.chunking import chunks_of
from parallel.digest import byte_flat, digest, digests
from parallel.formats import BLOCK
from parallel.reshard import Move
from parallel.shards import Rect
from parallel.transport.base import GROUPS, Link, Outbox, make_outbox
from parallel.transport.pack import source_memory

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of one machine

T = TypeVar("T")


@dataclass(frozen=True)
class SyncReport:
    """What one sync did: bytes and FP8 blocks (INT8: channels) moved, engine tensors (scales count) written, seconds in all and of proof.

    All bytes of the `proved` tensors had equal digests on both sides, or the sync would have raised.
    """

    bytes: int
    blocks: int
    tensors: int
    proved: int
    seconds: float
    proof_seconds: float
    restarts: int = 0
    """Engines that took the place of lost ones since the sync before; `recovery_seconds` is what that and repeated syncs took."""
    recovery_seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """By the names of the run log."""
        counts = {"sync/bytes": self.bytes, "sync/blocks": self.blocks, "sync/tensors": self.tensors, "sync/proved": self.proved}
        return {name: float(value) for name, value in counts.items()} | {
            "time/sync": self.seconds - self.proof_seconds,
            "time/proof": self.proof_seconds,
            "time/recovery": self.recovery_seconds,
            "engine/restarts": float(self.restarts),
        }


class WeightSync:
    """Runs syncs over a plan. Every trainer rank makes one; only rank 0 has the engine. All its methods are collective."""

    def __init__(
        self,
        plan: SyncPlan,
        engine: Engine | None,
        read_planes: Callable[[], dict[str, torch.Tensor]],
        settings: Sync | None = None,
    ) -> None:
        """`read_planes` gives this rank's live tensors (`mcore.weights.planes`), as the last optimizer step left them.

        Raises UserError for a transport that cannot work on these machines.
        """
        self.plan, self._read_planes, self._settings = plan, read_planes, settings or Sync()
        self._engine = cast(Engine, engine)  # used inside on_rank0 only
        self._rank = dist.get_rank()
        self.chunks = chunks_of(plan.moves, plan.buckets)
        check_hosts(self._settings, gathered(_BOOT_ID.read_text()))
        self._counts = {
            "bytes": sum(map(plan.bytes_of, plan.moves)),
            "blocks": sum(move.target_rect.rows * move.target_rect.cols for move in plan.moves if move.kind == "scale"),
            "tensors": len({(move.target_rank, move.target) for move in plan.moves}),
        }
        self._outbox: Outbox | None = None
        self._seen_once = False

    def close(self) -> None:
        """Ends the connection to the engine."""
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
            if self._rank == 0:
                with contextlib.suppress(RunError):  # an engine that is gone holds nothing
                    self._engine.disconnect()

    def run(self, version: int, hashing: bool = True) -> SyncReport:
        """Moves the trainer's weights into the engine as policy version `version`, and proves it before the engine serves them.

        `hashing` is turned off to measure what the proof costs, only. Raises RunError naming parameter, rank and first block when a
        byte differs, or when the engine fails; the engine then serves nothing any more. LostError where an engine or the
        connection was lost; after `close` the same sync may be run again.
        """
        start = time.perf_counter()
        planes = self._read_planes()
        outbox = self._outbox or self._connect()
        on_rank0(lambda: self._begin(hashing))
        sent, hash_seconds = self._send(outbox, planes, hashing)
        arrived = on_rank0(lambda: self._finish(version, hashing))
        proof_start = time.perf_counter()
        if hashing:
            self._compare(planes, sent, arrived)
            if self._settings.proof == "reread" or not self._seen_once:  # once at least: what end_sync does to weights is always the same
                self.prove(planes)
                self._seen_once = True
        proof_seconds = time.perf_counter() - proof_start + hash_seconds
        on_rank0(lambda: self._engine.resume())
        counts = self._counts
        return SyncReport(
            **counts, proved=counts["tensors"] if hashing else 0, seconds=time.perf_counter() - start, proof_seconds=proof_seconds
        )

    def _connect(self) -> Outbox:
        """Opens this rank's outbox while the engine ranks open their inboxes."""
        outbox = self._outbox = make_outbox(self._settings, self._rank, self.chunks)
        addresses = dict(enumerate(gathered(outbox.address)))
        link = Link(
            self._settings.transport,
            {str(rank): address for rank, address in addresses.items()},
            sorted({chunk.source for chunk in self.chunks}),
            sorted({chunk.target for chunk in self.chunks}),
            max(chunk.nbytes for chunk in self.chunks),
            self._settings.timeout,
        )
        on_rank0(lambda: self._engine.connect(link, self.chunks, self._settings.staged))
        self._together(lambda: outbox.open(addresses))
        return outbox

    def _stop_serving(self) -> None:
        self._engine.pause(self._settings.running)
        self._engine.begin_sync()

    def _begin(self, hashing: bool) -> None:
        """Rank 0: the engine begins to receive."""
        if not self._settings.staged:
            self._stop_serving()
        self._engine.start_receiving(hashing)

    def _finish(self, version: int, hashing: bool) -> dict[int, list[str]]:
        """Rank 0: all that was sent lies in the engine's live tensors, as version `version`; returns the digests by engine rank."""
        if self._settings.staged:
            self._stop_serving()
        arrived = self._engine.finish_receiving(hashing)
        self._engine.end_sync(version)
        return arrived

    def _send(self, outbox: Outbox, planes: dict[str, torch.Tensor], hashing: bool) -> tuple[dict[int, str], float]:
        """Sends this rank's chunks; returns the digests of all chunks, by number, and the longest time a rank took to make them."""

        def send() -> tuple[dict[int, str], float]:
            mine: dict[int, str] = {}
            memory = source_memory(planes, self.chunks, self._rank)
            for number, chunk in enumerate(self.chunks):
                if chunk.source == self._rank:
                    mine[number] = memory.pack(chunk.sources, byte_flat(outbox.buffer(chunk)), hashing)
                    outbox.send(chunk)
            outbox.finish()
            return mine, memory.hash_seconds

        parts = self._together(send)
        return {number: value for part, _ in parts for number, value in part.items()}, max(seconds for _, seconds in parts)

    def _together(self, part: Callable[[], T]) -> list[T]:
        """Every rank does its part and is told all results; where one fails, all raise RunError, with the engine's side of it."""
        result, failure, lost = None, "", False
        try:
            result = part()
        except (OSError, RuntimeError) as error:
            failure = f"trainer rank {self._rank}: {error}"
            lost = isinstance(error, OSError) or self._settings.transport in GROUPS  # whose errors are all RuntimeErrors
            if self._outbox is not None:
                self._outbox.close()  # the engine's ranks that wait for this one are told
        told = gathered((result, failure, lost))
        failures = [text for _, text, _ in told if text]
        if failures:
            reason, gone = on_rank0(self._engine_failure)
            kind = LostError if gone or any(lost for *_, lost in told) else RunError
            raise kind(f"the sync broke: {failures[0]}" + (f"; {reason}" if reason else ""))
        return [cast(T, value) for value, *_ in told]

    def _engine_failure(self) -> tuple[str, bool]:
        """What the engine's ranks say of a sync that broke, and whether an engine is lost."""
        try:
            self._engine.finish_receiving(False)
        except RunError as error:
            return str(error), isinstance(error, LostError)
        return "", False

    def _compare(self, planes: dict[str, torch.Tensor], sent: dict[int, str], arrived: dict[int, list[str]]) -> None:
        """Raises RunError where a chunk's digests differ."""
        found = {rank: iter(values) for rank, values in arrived.items()}
        for number, chunk in enumerate(self.chunks):
            if next(found[chunk.target]) != sent[number]:
                self.prove(planes)  # finds the block and raises
                raise RunError(f"the sync is not proved: {chunk.targets[0][0]} of engine rank {chunk.target} differed when it was written")

    def prove(self, planes: dict[str, torch.Tensor] | None = None) -> int:
        """Compares the digests of every move at its source and at its target, both sides at once; returns the engine tensors proved.

        Raises RunError at the first difference, naming parameter, rank and first block.
        """
        planes = planes or self._read_planes()
        moves = self.plan.moves
        with ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(_engine_digests, self._engine, moves) if self._rank == 0 else None
            own = [index for index, move in enumerate(moves) if move.source_rank == self._rank]
            mine = dict(zip(own, digests(planes, [(moves[index].source, moves[index].source_rect) for index in own]), strict=True))
            sent = {index: value for part in gathered(mine) for index, value in part.items()}
            arrived = on_rank0(lambda: theirs.result() if theirs else [])
        for index, move in enumerate(moves):
            if sent[index] != arrived[index]:
                self._raise_difference(planes, move)
        return len({(move.target_rank, move.target) for move in moves})

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
