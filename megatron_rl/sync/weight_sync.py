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

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import gather_from_ranks, run_on_rank0
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.transport_check import check_hosts
from parallel.chunking import make_chunks
from parallel.digest import as_byte_matrix, digest, digest_all
from parallel.formats import BLOCK
from parallel.reshard import Transfer
from parallel.shards import Rect
from parallel.transport.base import GROUPS, Link, Outbox, make_outbox
from parallel.transport.pack import make_source_packer

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
        read_named_tensors: Callable[[], dict[str, torch.Tensor]],
        settings: SyncConfig | None = None,
    ) -> None:
        """`read_named_tensors` gives this rank's live tensors (`mcore.weights.collect_named_tensors`), as the last optimizer step left
        them.

        Raises UserError for a transport that cannot work on these machines.
        """
        self.plan, self._read_named_tensors, self._settings = plan, read_named_tensors, settings or SyncConfig()
        self._engine = cast(Engine, engine)  # used inside run_on_rank0 only
        self._rank = dist.get_rank()
        self.chunks = make_chunks(plan.transfers, plan.buckets)
        check_hosts(self._settings, gather_from_ranks(_BOOT_ID.read_text()))
        self._counts = {
            "bytes": sum(map(plan.count_bytes, plan.transfers)),
            "blocks": sum(transfer.target_rect.rows * transfer.target_rect.cols for transfer in plan.transfers if transfer.kind == "scale"),
            "tensors": len({(transfer.target_rank, transfer.target) for transfer in plan.transfers}),
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
        byte differs, or when the engine fails; the engine then serves nothing any more. EngineLostError where an engine or the
        connection was lost; after `close` the same sync may be run again.
        """
        start = time.perf_counter()
        named_tensors = self._read_named_tensors()
        outbox = self._outbox or self._connect()
        run_on_rank0(lambda: self._begin(hashing))
        sent, hash_seconds = self._send(outbox, named_tensors, hashing)
        arrived = run_on_rank0(lambda: self._finish(version, hashing))
        proof_start = time.perf_counter()
        if hashing:
            self._compare_digests(named_tensors, sent, arrived)
            if self._settings.proof == "reread" or not self._seen_once:  # once at least: what end_sync does to weights is always the same
                self.prove(named_tensors)
                self._seen_once = True
        proof_seconds = time.perf_counter() - proof_start + hash_seconds
        run_on_rank0(lambda: self._engine.resume())
        counts = self._counts
        return SyncReport(
            **counts, proved=counts["tensors"] if hashing else 0, seconds=time.perf_counter() - start, proof_seconds=proof_seconds
        )

    def _connect(self) -> Outbox:
        """Opens this rank's outbox while the engine ranks open their inboxes."""
        outbox = self._outbox = make_outbox(self._settings, self._rank, self.chunks)
        addresses = dict(enumerate(gather_from_ranks(outbox.address)))
        link = Link(
            self._settings.transport,
            {str(rank): address for rank, address in addresses.items()},
            sorted({chunk.source for chunk in self.chunks}),
            sorted({chunk.target for chunk in self.chunks}),
            max(chunk.nbytes for chunk in self.chunks),
            self._settings.timeout,
        )
        run_on_rank0(lambda: self._engine.connect(link, self.chunks, self._settings.staged))
        self._run_on_all_ranks(lambda: outbox.open(addresses))
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

    def _send(self, outbox: Outbox, named_tensors: dict[str, torch.Tensor], hashing: bool) -> tuple[dict[int, str], float]:
        """Sends this rank's chunks; returns the digests of all chunks, by number, and the longest time a rank took to make them."""

        def send() -> tuple[dict[int, str], float]:
            mine: dict[int, str] = {}
            memory = make_source_packer(named_tensors, self.chunks, self._rank)
            for number, chunk in enumerate(self.chunks):
                if chunk.source == self._rank:
                    mine[number] = memory.pack(chunk.sources, as_byte_matrix(outbox.buffer(chunk)), hashing)
                    outbox.send(chunk)
            outbox.finish()
            return mine, memory.hash_seconds

        parts = self._run_on_all_ranks(send)
        return {number: value for part, _ in parts for number, value in part.items()}, max(seconds for _, seconds in parts)

    def _run_on_all_ranks(self, part: Callable[[], T]) -> list[T]:
        """Every rank does its part and is told all results; where one fails, all raise RunError, with the engine's side of it."""
        result, failure, lost = None, "", False
        try:
            result = part()
        except (OSError, RuntimeError) as error:
            failure = f"trainer rank {self._rank}: {error}"
            lost = isinstance(error, OSError) or self._settings.transport in GROUPS  # whose errors are all RuntimeErrors
            if self._outbox is not None:
                self._outbox.close()  # the engine's ranks that wait for this one are told
        told = gather_from_ranks((result, failure, lost))
        failures = [text for _, text, _ in told if text]
        if failures:
            reason, gone = run_on_rank0(self._engine_failure)
            kind = EngineLostError if gone or any(lost for *_, lost in told) else RunError
            raise kind(f"the sync broke: {failures[0]}" + (f"; {reason}" if reason else ""))
        return [cast(T, value) for value, *_ in told]

    def _engine_failure(self) -> tuple[str, bool]:
        """What the engine's ranks say of a sync that broke, and whether an engine is lost."""
        try:
            self._engine.finish_receiving(False)
        except RunError as error:
            return str(error), isinstance(error, EngineLostError)
        return "", False

    def _compare_digests(self, named_tensors: dict[str, torch.Tensor], sent: dict[int, str], arrived: dict[int, list[str]]) -> None:
        """Raises RunError where a chunk's digests differ."""
        found = {rank: iter(values) for rank, values in arrived.items()}
        for number, chunk in enumerate(self.chunks):
            if next(found[chunk.target]) != sent[number]:
                self.prove(named_tensors)  # finds the block and raises
                raise RunError(f"the sync is not proved: {chunk.targets[0][0]} of engine rank {chunk.target} differed when it was written")

    def prove(self, named_tensors: dict[str, torch.Tensor] | None = None) -> int:
        """Compares the digests of every transfer at its source and at its target, both sides at once; returns the engine tensors proved.

        Raises RunError at the first difference, naming parameter, rank and first block.
        """
        named_tensors = named_tensors or self._read_named_tensors()
        transfers = self.plan.transfers
        with ThreadPoolExecutor(1) as pool:
            theirs = pool.submit(_engine_digests, self._engine, transfers) if self._rank == 0 else None
            own = [index for index, transfer in enumerate(transfers) if transfer.source_rank == self._rank]
            mine = dict(
                zip(own, digest_all(named_tensors, [(transfers[index].source, transfers[index].source_rect) for index in own]), strict=True)
            )
            sent = {index: value for part in gather_from_ranks(mine) for index, value in part.items()}
            arrived = run_on_rank0(lambda: theirs.result() if theirs else [])
        for index, transfer in enumerate(transfers):
            if sent[index] != arrived[index]:
                self._raise_difference(named_tensors, transfer)
        return len({(transfer.target_rank, transfer.target) for transfer in transfers})

    def _raise_difference(self, named_tensors: dict[str, torch.Tensor], transfer: Transfer) -> None:
        """Finds the first block of a transfer that differs, by hashing its blocks one by one on both sides."""
        offsets = list(_split_into_blocks(transfer))
        mine: list[list[str]] = [[]]
        if self._rank == transfer.source_rank:
            mine = [[digest(named_tensors[transfer.source], _offset_rect(block, transfer.source_rect)) for block in offsets]]
        dist.broadcast_object_list(mine, src=transfer.source_rank)

        def first_difference() -> Rect:
            wanted = [(transfer.target, _offset_rect(block, transfer.target_rect)) for block in offsets]
            theirs = self._engine.digest_rects({transfer.target_rank: wanted})[transfer.target_rank]
            return next((block for block, a, b in zip(offsets, mine[0], theirs, strict=True) if a != b), offsets[0])

        block = _offset_rect(run_on_rank0(first_difference), transfer.target_rect)
        raise RunError(
            f"the sync is not proved: {transfer.target} of engine rank {transfer.target_rank} differs from {transfer.source} "
            f"of trainer rank {transfer.source_rank}; first in rows {block.row}..{block.row + block.rows - 1}, "
            f"columns {block.col}..{block.col + block.cols - 1} ({transfer.kind})"
        )


def _engine_digests(engine: Engine, transfers: Sequence[Transfer]) -> list[str]:
    """The engine's digest of every transfer's target rectangle, in the order of the transfers."""
    wanted: dict[int, list[tuple[str, Rect]]] = defaultdict(list)
    for transfer in transfers:
        wanted[transfer.target_rank].append((transfer.target, transfer.target_rect))
    found = {rank: iter(values) for rank, values in engine.digest_rects(wanted).items()}
    return [next(found[transfer.target_rank]) for transfer in transfers]


def _split_into_blocks(transfer: Transfer) -> list[Rect]:
    """A transfer cut into FP8 blocks (or, for scales, single values), told from the transfer's own corner."""
    step = 1 if transfer.kind == "scale" else BLOCK
    rect = transfer.target_rect
    return [
        Rect(row, col, min(step, rect.rows - row), min(step, rect.cols - col))
        for row in range(0, rect.rows, step)
        for col in range(0, rect.cols, step)
    ]


def _offset_rect(block: Rect, corner: Rect) -> Rect:
    return Rect(corner.row + block.row, corner.col + block.col, block.rows, block.cols)
