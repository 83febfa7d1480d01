"""What the engine ranks receive, put together from what every trainer rank has planned to send. Trainer rank r keeps the chunks of engine
ranks r, r + N, r + 2N, ... of N trainer ranks: it checks that they are the whole weights, and puts them in order. No rank sees all chunks;
rank 0 only passes each engine rank's list on, as text that it does not read."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from megatron_rl.distributed import errors_on_all_ranks, exchange_bytes, gather_from_ranks, gather_on_rank0, get_rank_and_size
from megatron_rl.sync.checks import check_coverage, check_pairs
from megatron_rl.sync.plan import SyncPlan
from parallel.chunking import Chunk, encode_chunks
from parallel.coverage import Size
from parallel.transport.base import Route


class Schedule:
    """The chunks of all ranks. Every trainer rank constructs one; all methods are collective."""

    def __init__(self, plan: SyncPlan) -> None:
        """Raises RunError if the chunks of all ranks leave out a byte of an engine rank's weights, send one twice, or
        send another tensor's."""
        self._rank, self._world = get_rank_and_size()
        self.own = [chunk for chunk in plan.chunks if chunk.source == self._rank]
        """Chunks of this rank, in the order in which it sends them."""
        with errors_on_all_ranks():
            check_pairs(plan, self.own)
        received = self._receive(self.own)
        with errors_on_all_ranks():
            kept = check_coverage(plan, {rank: received[rank] for rank in range(self._rank, len(plan.targets), self._world)})
        self._senders = {rank: [chunk.source for chunk in chunks] for rank, chunks in received.items()}
        self._texts = {rank: encode_chunks(chunks) for rank, chunks in received.items()}
        parts = gather_from_ranks([(rank, *size, len(received[rank])) for rank, size in kept.items()], list[tuple[int, int, int, int]])
        ordered = sorted(each for part in parts for each in part)
        self.sizes = [Size(tensors, nbytes) for _, tensors, nbytes, _ in ordered]
        """Size of each engine rank's weights."""
        self.counts = [count for *_, count in ordered]
        """Number of chunks that each engine rank receives."""
        sizes = [chunk.nbytes for chunk in self.own]
        scales = [each.target_rect for each in plan.transfers if each.of_scales and each.source_rank == self._rank]
        own = sum(sizes), max(sizes, default=0), sum(rect.rows * rect.cols for rect in scales)
        sent = gather_from_ranks(own, tuple[int, int, int])
        self.total_bytes, self.scales = sum(nbytes for nbytes, _, _ in sent), sum(scales for *_, scales in sent)
        self.route = Route(
            tuple(rank for rank, (nbytes, _, _) in enumerate(sent) if nbytes),
            tuple(rank for rank, count in enumerate(self.counts) if count),
            max(largest for _, largest, _ in sent),
        )

    def gather_chunks(self) -> dict[int, str]:
        """Return, on rank 0, the chunks of each engine rank in order, as `encode_chunks` writes them."""
        return self._gather(self._texts)

    def gather_places(self, parts: Sequence[Chunk]) -> dict[int, str]:
        """Return, on rank 0, JSON [[offset, bytes], ...] of the part of each chunk that is sent, by engine rank. `parts`: of `own`."""
        places = self._exchange([(part.target, [part.offset, part.nbytes]) for part in parts])
        texts = {}
        for target, senders in self._senders.items():
            next_place = {source: iter(own) for source, own in places[target].items()}
            texts[target] = json.dumps([next(next_place[source]) for source in senders])
        return self._gather(texts)

    def _receive(self, own: Sequence[Chunk]) -> dict[int, list[Chunk]]:
        """Return the chunks of the engine ranks that this rank keeps, in order."""
        received: dict[int, list[Chunk]] = defaultdict(list)
        for target, by_source in self._exchange([(chunk.target, [chunk.buffer, chunk.to_json()]) for chunk in own]).items():
            chunks = [(buffer, source, fields) for source, sent in by_source.items() for buffer, fields in sent]
            received[target] = [Chunk.from_json(target, fields) for _, _, fields in sorted(chunks, key=lambda each: each[:2])]
        return received

    def _exchange(self, entries: Iterable[tuple[int, list[Any]]]) -> dict[int, dict[int, list[list[Any]]]]:
        """Send each engine rank's entries to the rank that keeps them. Return those kept here by engine rank and sender."""
        outgoing: list[dict[int, list[list[Any]]]] = [defaultdict(list) for _ in range(self._world)]
        for target, entry in entries:
            outgoing[target % self._world][target].append(entry)
        kept: dict[int, dict[int, list[list[Any]]]] = defaultdict(dict)
        for source, text in enumerate(exchange_bytes([json.dumps(each).encode() for each in outgoing])):
            for target, own in json.loads(text).items():
                kept[int(target)][source] = own
        return kept

    def _gather(self, texts: dict[int, str]) -> dict[int, str]:
        parts = gather_on_rank0(json.dumps(texts).encode())
        return {int(rank): text for part in parts for rank, text in json.loads(part).items()}
