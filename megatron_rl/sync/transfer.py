"""The transfer of a sync: trainer ranks send chunks straight to the engine ranks, while the engine answers no request. Bytes are never
dequantized, cast or quantized on the way. Memory overhead is two chunks per process (`parallel.transport.base`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0, errors_on_all_ranks, gather_from_ranks, sum_over_ranks
from megatron_rl.errors import EngineLostError, RunError, as_run_error
from megatron_rl.rollout.engine import Engine, Places, Roots
from megatron_rl.sync.checks import check_one_host
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.schedule import Schedule
from parallel.chunking import Chunk, resize
from parallel.digest import as_byte_matrix
from parallel.plug import PlugError, find_plug_error
from parallel.shards import NamedRect
from parallel.transport.base import Link, Outbox
from parallel.transport.pack import ChunkPacker, Difference, make_source_packer

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of one machine

T = TypeVar("T")
MAX_DELTA_SHARE = 1 / 2  # `sync.delta = "auto"` sends deltas if they take at most this share of all bytes


@dataclass(frozen=True)
class Transferred:
    nbytes: int  # bytes sent by all ranks
    changed_share: float | None  # share of all bytes that differ from the base, or None if nothing was compared
    sent: list[str]  # digests of this rank's chunks; empty strings without hashing
    arrived: Roots  # of the engine's live weights
    hash_seconds: float  # longest time that a trainer rank spent on hashing


class WeightTransfer:
    """Sends a plan's chunks to the live engine. Every trainer rank constructs one; all methods are collective."""

    def __init__(
        self, plan: SyncPlan, schedule: Schedule, engine: Rank0[Engine], settings: SyncConfig, notify: Callable[[str], None]
    ) -> None:
        """Raises UserError for a transport that cannot work over several machines."""
        self._schedule, self._engine, self._settings, self._notify, self._rank = schedule, engine, settings, notify, dist.get_rank()
        self._transport = settings.load_transport()
        if (hosts := len(set(gather_from_ranks(_BOOT_ID.read_text(encoding="utf-8"), str)))) > 1:
            check_one_host(settings, f"the trainer's ranks are on {hosts}")
        self._outbox: Outbox | None = None
        self._own = schedule.own
        auto_pays = not self._transport.one_host and not torch.cuda.is_available()
        self._has_frozen = plan.has_adapters
        self._frozen = [number for number, chunk in enumerate(self._own) if plan.freezes(chunk)]
        self._frozen_digests = dict[int, str]()  # in the first hashed sync
        self.keeps_base = not self._has_frozen and (settings.delta == "on" or (settings.delta == "auto" and auto_pays))
        """Whether syncs send deltas against a copy of the bytes of the last sync."""
        self._base, self._base_is_proved = DeltaBase(), False
        self._reported: set[str] = set()
        self.total_bytes = schedule.total_bytes  # bytes of a sync that sends everything

    def open(self) -> None:
        """Open this rank's outbox, while the engine ranks open their inboxes. Does nothing if they are connected already."""
        if self._outbox is not None:
            return
        route = self._schedule.route
        with errors_on_all_ranks(), as_run_error():
            self._outbox = self._transport.make_outbox(self._settings, self._rank, self._own, route)
        outbox = self._outbox
        addresses = dict(enumerate(gather_from_ranks(outbox.address, Any)))
        link = Link(
            self._settings.transport,
            {str(rank): address for rank, address in addresses.items()},
            list(route.sources),
            list(route.targets),
            route.largest,
            self._settings.timeout,
        )
        chunks = self._schedule.gather_chunks()
        self._engine.run(lambda engine: engine.connect(link, chunks, self._settings.staged))
        self._run_on_all_ranks(lambda: outbox.open(addresses), None)

    def close(self) -> None:
        """Close the connection to the engine. The next transfer sends everything."""
        self._base, self._base_is_proved = DeltaBase(), False
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
            with contextlib.suppress(RunError):  # a lost engine cannot be disconnected
                self._engine.run_local(lambda engine: engine.disconnect())

    def run(self, named_tensors: dict[str, torch.Tensor], version: int, hashing: bool) -> Transferred:
        """Bring the engine's live weights to `version`: send deltas if the last transfer was proved, everything otherwise."""
        assert self._outbox is not None
        base_is_proved, self._base_is_proved = self._base_is_proved, False  # until `mark_proved`
        packer = make_source_packer(named_tensors, self._own, self._rank)
        changes = self._find_changes(packer, hashing) if base_is_proved else None
        parts = resize(self._own, changes.sizes) if changes else self._own
        places = self._schedule.gather_places(parts) if changes else None
        self._engine.run(lambda engine: self._start_receiving(engine, hashing, places))
        own, sent = changes.own if changes else {}, list[str]()
        seconds = self._run_on_all_ranks(lambda: self._send(packer, parts, own, hashing, sent), float)
        arrived = self._engine.run(lambda engine: self._finish_receiving(engine, version, hashing), Roots)
        nbytes = changes.nbytes if changes else self.total_bytes
        return Transferred(nbytes, changes.changed_share if changes else None, sent, arrived, max(seconds))

    def mark_proved(self, transferred: Transferred) -> None:
        """Allow the next transfer to rely on what the engine holds now."""
        self._base_is_proved = self.keeps_base or self._has_frozen
        self._frozen_digests = self._frozen_digests or {
            number: transferred.sent[number] for number in self._frozen if transferred.sent[number]
        }

    def find_changed_frozen(self, sent: list[str]) -> str:
        """Return the first weight of a chunk that training does not change, but whose bytes in the trainer have changed since the first
        sync, or "". `sent`: digests of this rank's chunks in this sync."""
        if not self._has_frozen:
            return ""
        changed = (self._own[number] for number, digest in self._frozen_digests.items() if sent[number] != digest)
        found = next((f"{chunk.sources[0][0]} or a weight after it on trainer rank {chunk.source}" for chunk in changed), "")
        return next(filter(None, gather_from_ranks(found, str)), "")

    def _start_receiving(self, engine: Engine, hashing: bool, places: Places | None) -> None:
        """Let the engine receive all chunks, or, if given, only the parts of them at `places`."""
        if not self._settings.staged:
            self._stop_serving(engine)
        engine.start_receiving(hashing, places)

    def _finish_receiving(self, engine: Engine, version: int, hashing: bool) -> Roots:
        if self._settings.staged:
            self._stop_serving(engine)
        arrived = engine.finish_receiving(hashing)
        engine.end_sync(version)
        return arrived

    def _stop_serving(self, engine: Engine) -> None:
        engine.pause(self._settings.running)
        engine.begin_sync()

    def _find_changes(self, packer: ChunkPacker, hashing: bool) -> Changes:
        """Compare the live tensors of all ranks with the base, and decide how many bytes of each chunk to send."""
        if self._has_frozen:  # the engine holds frozen chunks already; both sides still hash them
            frozen = set(self._frozen)
            sizes = [0 if number in frozen else chunk.nbytes for number, chunk in enumerate(self._own)]
            (nbytes,) = sum_over_ranks([sum(sizes)])
            return Changes({}, sizes, nbytes, nbytes / self.total_bytes)
        changes = gather_changes(self._base.compare(packer, dict(enumerate(self._own)), hashing), self._own, self.total_bytes)
        nbytes = changes.nbytes
        send_deltas = self._settings.delta == "on" or nbytes <= MAX_DELTA_SHARE * self.total_bytes
        decision = "sending what changed" if send_deltas else "sending everything"
        if decision not in self._reported:
            self._reported.add(decision)
            share = f"{changes.changed_share:.2%} of the bytes changed, and their deltas take {nbytes / self.total_bytes:.2%} of all bytes"
            self._notify(f"sync.delta = {self._settings.delta}: {decision}; {share}")
        return changes if send_deltas else replace(changes, sizes=[chunk.nbytes for chunk in self._own], nbytes=self.total_bytes)

    def _send(
        self, packer: ChunkPacker, parts: Sequence[Chunk], differences: dict[int, Difference], hashing: bool, sent: list[str]
    ) -> float:
        """Send this rank's chunks, or the `parts` of them. Append their digests to `sent`, and return the seconds spent on hashing."""
        outbox = cast(Outbox, self._outbox)
        digests = {number: difference.digest for number, difference in differences.items()}
        hashed = dict[tuple[NamedRect, ...], str]()  # engines that get the same bytes share one digest
        outbox.start([part for part in parts if part.nbytes])
        for number, chunk in enumerate(self._own):
            if not (part := parts[number]).nbytes:
                if number not in digests:  # frozen; the engine hashes its bytes at the same time
                    if chunk.sources not in hashed:
                        hashed[chunk.sources] = packer.hash_all([chunk.sources])[0] if hashing else ""
                    digests[number] = hashed[chunk.sources]
                continue
            flat, difference = as_byte_matrix(outbox.buffer(part)), differences.get(number)
            if difference is not None and part.nbytes < chunk.nbytes:
                flat[...] = difference.delta
            elif difference is not None:
                packer.pack(chunk.sources, flat, False)  # hashed during the comparison
            else:
                digest = packer.pack(chunk.sources, flat, hashing and chunk.sources not in hashed)
                digests[number] = hashed.setdefault(chunk.sources, digest)
                if self.keeps_base:
                    self._base.remember(chunk, flat)
            outbox.send(part)
        outbox.finish()
        sent += [digests[number] for number in range(len(self._own))]
        return packer.hash_seconds

    def _run_on_all_ranks(self, step: Callable[[], T], kind: Any) -> list[T]:
        """Run `step` on every rank and return all results, of type `kind`. If a rank fails, raise RunError with the engine's error on all
        ranks."""
        result, failure, lost, own = None, "", False, False
        try:
            result = step()
        except Exception as error:
            lost = isinstance(error, self._transport.lost_errors)
            plug_error = None if lost else find_plug_error(error)
            if not lost and plug_error is None and not isinstance(error, OSError | RuntimeError):
                raise
            own, failure = plug_error is not None, f"trainer rank {self._rank}: {plug_error or error}"
            if self._outbox is not None:
                self._outbox.close()  # engine ranks that wait for this rank fail at once
        outcomes = gather_from_ranks((result, failure, lost, own), tuple[kind, str, bool, bool] | tuple[None, str, bool, bool])
        failures = [failure for _, failure, _, _ in sorted(outcomes, key=lambda outcome: not outcome[3]) if failure]
        if failures:
            reason, engine_lost = self._engine.run(_read_failure, tuple[str, bool])
            own_fails = PlugError.__name__ in reason or any(own for *_, own in outcomes)  # a user's own transport would fail again
            is_lost = engine_lost or any(lost for _, _, lost, _ in outcomes)
            error_class = EngineLostError if is_lost and not own_fails else RunError
            raise error_class(f"the sync broke: {failures[0]}" + (f"; {reason}" if reason else ""))
        return [cast(T, result) for result, *_ in outcomes]


def _read_failure(engine: Engine) -> tuple[str, bool]:
    """Return the engine's error message after a failed transfer, and whether an engine is lost."""
    try:
        engine.finish_receiving(False)
    except RunError as error:
        return str(error), isinstance(error, EngineLostError)
    return "", False


@dataclass(frozen=True)
class Changes:
    """How the chunks of all ranks differ from the base."""

    own: dict[int, Difference]  # differences of this rank's chunks, by chunk number
    sizes: list[int]  # bytes to send for each of this rank's chunks: the size of its delta, or of the whole chunk
    nbytes: int  # bytes to send, of all ranks
    changed_share: float  # share of all bytes that differ from the base


class DeltaBase:
    """The bytes of one rank's chunks as the engines are assumed to hold them, in host memory. Empty before the first sync. Engines that get
    the same chunk share one copy. The proof hashes all live bytes on both sides, and a wrong base is discarded."""

    def __init__(self) -> None:
        self._flats: dict[tuple[NamedRect, ...], np.ndarray] = {}

    def remember(self, chunk: Chunk, flat: np.ndarray) -> None:
        """Copy the bytes of a chunk that is sent as a whole."""
        if chunk.sources in self._flats:
            self._flats[chunk.sources][...] = flat
        else:
            self._flats[chunk.sources] = flat.copy()

    def compare(self, packer: ChunkPacker, chunks: dict[int, Chunk], hashing: bool) -> dict[int, Difference]:
        """Compare the live bytes of numbered chunks with the base, and store them in it. Chunks with the same sources are read once."""
        found: dict[tuple[NamedRect, ...], Difference] = {}
        for chunk in chunks.values():
            if chunk.sources not in found:
                found[chunk.sources] = packer.compare(chunk.sources, self._flats[chunk.sources], hashing)
        return {number: found[chunk.sources] for number, chunk in chunks.items()}

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self._flats.values())


def gather_changes(own: dict[int, Difference], chunks: Sequence[Chunk], total_bytes: int) -> Changes:
    """Combine the differences of this rank's chunks with those of all ranks. Collective."""
    sizes = [chunk.nbytes if (delta := own[number].delta) is None else len(delta) for number, chunk in enumerate(chunks)]
    nbytes, changed = sum_over_ranks([sum(sizes), sum(found.changed for found in own.values())])
    return Changes(own, sizes, nbytes, changed / total_bytes)
