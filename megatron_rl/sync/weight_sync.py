"""The sync: the trainer's blocks go to the live engine as bytes, and every sync proves that they arrived.

Nothing is dequantised, cast or quantised on the way. Trainer ranks send chunk by chunk straight to the engine ranks that need them
(`parallel.transport.base`), while the engine answers no request; so the extra memory is two chunks. Every chunk is hashed at both
ends: in the trainer's live tensors, and in the engine's after it was written there. The engine accounts for every tensor that it made of
those (`rollout_sglang.derived_tensors`), and answers a canary (`megatron_rl.training.canary`). On CPUs hashes and canary are computed
while the engine samples already; it gives no answer before both have passed.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0, gather_from_ranks
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.delta import WORTH_IT, DeltaBase
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.proof import ByteProof
from megatron_rl.sync.report import SyncReport
from megatron_rl.sync.transport_check import check_one_host, check_transport
from parallel.chunking import Chunk, resize
from parallel.digest import as_byte_matrix
from parallel.shards import NamedRect
from parallel.transport.base import Link, Outbox
from parallel.transport.pack import ChunkPacker, Difference, make_source_packer

_NOTHING = np.empty(0, np.uint8)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of one machine

T = TypeVar("T")


class Canary(Protocol):
    """A few tokens through engines and trainer."""

    def ask(self, engines: Engine) -> None:
        """Begin to ask every engine. Rank 0."""

    def check(self, engines: Rank0[Engine], version: int, named_tensors: dict[str, torch.Tensor]) -> float:
        """Return the largest difference found; `named_tensors`: this rank's. Collective. Raise RunError for one that is too large."""


@dataclass(frozen=True)
class _Changes:
    """How all ranks' chunks differ from the base."""

    own: dict[int, Difference]
    """Of this rank's, by number."""
    sizes: list[int]
    """Bytes that are sent of every chunk: of its delta, or the chunk's own."""
    share: float
    """Bytes that differ."""


@dataclass(frozen=True)
class _Moved:
    """What went over to the engine."""

    changes: _Changes | None
    """None where nothing was compared."""
    nbytes: int
    sent: dict[int, str]
    """Digests of all ranks' chunks, by number."""
    arrived: dict[int, list[str]]
    """Those of the live weights, by engine rank; both are empty where they are hashed later."""
    hash_seconds: float
    """The most that a trainer rank spent on hashing."""


class WeightSync:
    """Runs syncs over a plan. Every trainer rank constructs one; all methods are collective."""

    def __init__(
        self,
        plan: SyncPlan,
        engine: Rank0[Engine],
        read_named_tensors: Callable[[], dict[str, torch.Tensor]],
        settings: SyncConfig,
        canary: Canary | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`read_named_tensors` returns this rank's live tensors after the last optimizer step, as
        `mcore.weights.load_weights.collect_named_tensors` does. Raises UserError for a transport that cannot work on these machines."""
        self.plan, self._engine, self._read_named_tensors, self._settings = plan, engine, read_named_tensors, settings
        self._rank, self._canary, self._notify = dist.get_rank(), canary, notify
        self._proof = ByteProof(plan, engine)
        check_transport(self._settings)
        self._transport = self._settings.load_transport()
        if (hosts := len(set(gather_from_ranks(_BOOT_ID.read_text())))) > 1:
            check_one_host(self._settings, f"the trainer's ranks are on {hosts}")
        self._counts = {
            "blocks": sum(transfer.target_rect.rows * transfer.target_rect.cols for transfer in plan.transfers if transfer.of_scales),
            "tensors": len({(transfer.target_rank, transfer.target) for transfer in plan.transfers}),
        }
        self._outbox: Outbox | None = None
        self._reread_done = False  # once is enough with proof "streamed": end_sync does the same to weights every time
        self._nbytes = sum(chunk.nbytes for chunk in plan.chunks)
        self._own_chunks = {number: chunk for number, chunk in enumerate(plan.chunks) if chunk.source == self._rank}
        apart = not self._transport.one_host and not torch.cuda.is_available()
        self._keeps_base = not plan.frozen and (settings.delta == "on" or (settings.delta == "auto" and apart))
        self._frozen_digests: dict[int, str] = {}
        self._base, self._said = DeltaBase(), set[str]()
        self._proves_later = settings.proof == "reread" and not self._keeps_base and not torch.cuda.is_available()

    def close(self) -> None:
        """End the connection to the engine; the next sync sends everything."""
        self._base = DeltaBase()
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
            with contextlib.suppress(RunError):  # an engine that is gone holds nothing
                self._engine.tell(lambda engine: engine.disconnect())

    def run(self, version: int, hashing: bool = True, meanwhile: Callable[[], None] = lambda: None) -> SyncReport:
        """Move the trainer's weights into the engine as policy version `version`, and prove it before the engine answers with them.

        `hashing` is turned off only to measure what the proof costs. `meanwhile` is called when the engine samples already, so that it has
        work during the proof. Raises RunError naming parameter, rank and first block when a byte differs, or when the engine fails; the
        engine then answers nothing any more. Raises EngineLostError where an engine or the connection was lost; after `close` the same
        sync may be run again.
        """
        start = time.perf_counter()
        named_tensors = self._read_named_tensors()
        outbox = self._outbox or self._connect()
        compared, self._base.proved = self._base.proved, False  # until this sync is
        later = hashing and self._proves_later
        moved, wrong_bases = self._move(outbox, named_tensors, version, hashing and not later, compared), 0
        moved_at = time.perf_counter()
        if hashing and not later:
            try:
                self._proof.compare_digests(named_tensors, moved.sent, moved.arrived)
            except RunError as error:
                moved, wrong_bases = self._move_everything(outbox, named_tensors, version, moved, error), 1
            if self._settings.proof == "reread" or not self._reread_done:
                self._prove_anew(named_tensors, moved.sent)
        hashed_at = time.perf_counter()
        derived = self._account_for_tensors() if hashing else 0
        canary = self._canary if hashing else None
        self._engine.run(lambda engine: self._admit(engine, canary, later))
        meanwhile()
        admitted_at = time.perf_counter()
        if later:
            self._prove_anew(named_tensors, self._proof.hash_chunks(named_tensors))
        proved_at = time.perf_counter()
        difference = canary.check(self._engine, version, named_tensors) if canary else 0.0
        canary_seconds = time.perf_counter() - proved_at
        self._base.proved = self._keeps_base or bool(self.plan.frozen)
        self._frozen_digests = self._frozen_digests or moved.sent
        self._engine.run(lambda engine: engine.resume())
        return SyncReport(
            **self._counts,
            bytes=moved.nbytes,
            wrong_bases=wrong_bases,
            changed_share=moved.changes.share if moved.changes else None,
            proved=self._counts["tensors"] if hashing else 0,
            seconds=time.perf_counter() - start,
            proof_seconds=hashed_at - moved_at + moved.hash_seconds + proved_at - admitted_at,
            served_seconds=admitted_at - hashed_at,
            canary_seconds=canary_seconds,
            derived=derived,
            canary=difference,
        )

    def _admit(self, engine: Engine, canary: Canary | None, rereading: bool) -> None:
        """Let the engine sample. It gets the canary when it can answer, and while the next completions' requests are being made."""
        if rereading:
            engine.start_rereading()
        engine.admit()
        if canary is not None:
            canary.ask(engine)

    def _prove_anew(self, named_tensors: dict[str, torch.Tensor], sent: dict[int, str]) -> None:
        """Compare `sent` with what the live weights hold after the change is closed."""
        if not self._proves_later:
            self._engine.run(lambda engine: engine.start_rereading())
        self._proof.compare_digests(named_tensors, sent, self._engine.run(lambda engine: engine.finish_rereading()))
        self._reread_done = True

    def prove(self) -> int:
        """Compare all bytes on both sides as they are now; return the engine tensors proved. Raise RunError as `run` does."""
        self._proof.compare_transfers(self._read_named_tensors())
        return self._counts["tensors"]

    def _account_for_tensors(self) -> int:
        """Return how many tensors the engine made of those that were sent. Raise RunError if what it would serve does not follow from
        them."""
        reports = self._engine.run(lambda engine: engine.account_for_tensors())
        for rank, report in enumerate(reports):
            if report.wrong:
                raise RunError(f"the sync is not proved: engine rank {rank}: {report.wrong}")
        return sum(report.derived for report in reports)

    def _connect(self) -> Outbox:
        """Open this rank's outbox while the engine ranks open their inboxes."""
        chunks = self.plan.chunks
        outbox = self._outbox = self._transport.make_outbox(self._settings, self._rank, chunks)
        addresses = dict(enumerate(gather_from_ranks(outbox.address)))
        link = Link(
            self._settings.transport,
            {str(rank): address for rank, address in addresses.items()},
            sorted({chunk.source for chunk in chunks}),
            sorted({chunk.target for chunk in chunks}),
            max(chunk.nbytes for chunk in chunks),
            self._settings.timeout,
        )
        self._engine.run(lambda engine: engine.connect(link, chunks, self._settings.staged))
        self._run_on_all_ranks(lambda: outbox.open(addresses))
        return outbox

    def _stop_serving(self, engine: Engine) -> None:
        engine.pause(self._settings.running)
        engine.begin_sync()

    def _begin(self, engine: Engine, hashing: bool, sent: Sequence[Chunk] | None) -> None:
        """Let the engine begin to receive; `sent`: what comes of all chunks, where that is not all of them."""
        if not self._settings.staged:
            self._stop_serving(engine)
        places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for part in sent or ():
            places[part.target].append((part.offset, part.nbytes))
        engine.start_receiving(hashing, places or None)

    def _finish(self, engine: Engine, version: int, hashing: bool) -> dict[int, list[str]]:
        """Wait until the engine's live tensors hold version `version`; return their digests by engine rank."""
        if self._settings.staged:
            self._stop_serving(engine)
        arrived = engine.finish_receiving(hashing)
        engine.end_sync(version)
        return arrived

    def _move(self, outbox: Outbox, named_tensors: dict[str, torch.Tensor], version: int, hashing: bool, compared: bool) -> _Moved:
        """Bring the engine's live weights to `version`; `compared`: by what differs from the base."""
        packer = make_source_packer(named_tensors, self.plan.chunks, self._rank)
        changes = self._find_changes(packer, hashing) if compared else None
        sent = resize(self.plan.chunks, changes.sizes) if changes else self.plan.chunks
        self._engine.run(lambda engine: self._begin(engine, hashing, sent if changes else None))
        results = self._run_on_all_ranks(lambda: self._send(outbox, packer, sent, changes.own if changes else {}, hashing))
        return _Moved(
            changes,
            sum(part.nbytes for part in sent),
            {number: value for digests, _ in results for number, value in digests.items()},
            self._engine.run(lambda engine: self._finish(engine, version, hashing)),
            max(seconds for _, seconds in results),
        )

    def _move_everything(
        self, outbox: Outbox, named_tensors: dict[str, torch.Tensor], version: int, deltas: _Moved, error: RunError
    ) -> _Moved:
        """Repeat a sync that is not proved by `error`, as the engine held something else than the base. Raise the error where that
        is no reason, or the sync is not proved again."""
        if deltas.nbytes == self._nbytes or isinstance(error, EngineLostError):
            raise error
        self._notify(f"an engine did not hold what the sync before proved, everything is sent: {error}")
        moved = self._move(outbox, named_tensors, version, True, False)
        self._proof.compare_digests(named_tensors, moved.sent, moved.arrived)
        return moved

    def _find_changes(self, packer: ChunkPacker, hashing: bool) -> _Changes:
        """Compare the live tensors with the base, on all ranks."""
        chunks = self.plan.chunks
        if frozen := self.plan.frozen:  # what was proved stays; its bytes are hashed again at both ends
            own = {number: Difference(self._frozen_digests.get(number, ""), 0, _NOTHING) for number in frozen & self._own_chunks.keys()}
            sizes = [0 if number in frozen else chunk.nbytes for number, chunk in enumerate(chunks)]
            return _Changes(own, sizes, sum(sizes) / self._nbytes)
        own = self._base.compare(packer, self._own_chunks, hashing)
        own_sizes = {number: chunks[number].nbytes if found.delta is None else len(found.delta) for number, found in own.items()}
        gathered = gather_from_ranks((own_sizes, sum(found.changed for found in own.values())))
        by_number = {number: size for sizes, _ in gathered for number, size in sizes.items()}
        share, nbytes = sum(changed for _, changed in gathered) / self._nbytes, sum(by_number.values())
        pays = self._settings.delta == "on" or nbytes <= WORTH_IT * self._nbytes
        self._say_once(f"sync.delta = {self._settings.delta}: ", "what changed is sent" if pays else "everything is sent", share, nbytes)
        return _Changes(own, [by_number[number] if pays else chunk.nbytes for number, chunk in enumerate(chunks)], share)

    def _say_once(self, subject: str, what: str, share: float, nbytes: int) -> None:
        if what not in self._said:
            self._said.add(what)
            self._notify(f"{subject}{what}; {share:.2%} of the bytes changed, to send them takes {nbytes / self._nbytes:.2%} of all bytes")

    def _send(
        self, outbox: Outbox, packer: ChunkPacker, sent: Sequence[Chunk], own: dict[int, Difference], hashing: bool
    ) -> tuple[dict[int, str], float]:
        """Send of this rank's chunks what `sent` says; return their digests, by number, and the seconds spent on hashing."""
        digests = {number: found.digest for number, found in own.items()}
        hashed = dict[tuple[NamedRect, ...], str]()  # once for all engines that get the same bytes
        outbox.start([part for part in sent if part.nbytes])
        for number, chunk in self._own_chunks.items():
            if not (part := sent[number]).nbytes:
                continue
            flat, found = as_byte_matrix(outbox.buffer(part)), own.get(number)
            if found is not None and part.nbytes < chunk.nbytes:
                flat[...] = found.delta
            elif found is not None:
                packer.pack(chunk.sources, flat, False)  # was hashed when it was compared
            else:
                value = packer.pack(chunk.sources, flat, hashing and chunk.sources not in hashed)
                digests[number] = hashed.setdefault(chunk.sources, value)
                if self._keeps_base:
                    self._base.remember(chunk, flat)
            outbox.send(part)
        outbox.finish()
        return digests, packer.hash_seconds

    def _run_on_all_ranks(self, step: Callable[[], T]) -> list[T]:
        """Run `step` on every rank and return all results; where one fails, all raise RunError, with what the engine says of it."""
        result, failure, lost = None, "", False
        expected: tuple[type[Exception], ...] = (OSError, RuntimeError, *self._transport.lost_errors)
        try:
            result = step()
        except expected as error:
            failure = f"trainer rank {self._rank}: {error}"
            lost = isinstance(error, self._transport.lost_errors)
            if self._outbox is not None:
                self._outbox.close()  # so that the engine ranks that wait for this one fail at once
        outcomes = gather_from_ranks((result, failure, lost))
        failures = [failure for _, failure, _ in outcomes if failure]
        if failures:
            reason, engine_lost = self._engine.run(_read_failure)
            error_class = EngineLostError if engine_lost or any(lost for *_, lost in outcomes) else RunError
            raise error_class(f"the sync broke: {failures[0]}" + (f"; {reason}" if reason else ""))
        return [cast(T, result) for result, *_ in outcomes]


def _read_failure(engine: Engine) -> tuple[str, bool]:
    """Return what the engine's ranks say of a sync that broke, and whether an engine is lost."""
    try:
        engine.finish_receiving(False)
    except RunError as error:
        return str(error), isinstance(error, EngineLostError)
    return "", False
