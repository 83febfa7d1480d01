"""Compares the bytes of trainer and engine: the roots of all digests of an engine rank first, and if one differs, the digests of its single
rectangles and blocks, to name the block. Each rank hashes and compares what it sends."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from megatron_rl.distributed import (
    Rank0,
    broadcast_from,
    gather_from_ranks,
    gather_on_rank0,
    scatter_from_rank0,
    sum_over_ranks,
)
from megatron_rl.errors import RunError
from megatron_rl.rollout.engine import Engine, Roots
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.schedule import Schedule
from parallel.digest import digest, digest_all
from parallel.formats import BLOCK
from parallel.proof_root import ROOT_NUMBERS, fold_digests, reduce_root
from parallel.reshard import Transfer
from parallel.shards import NamedRect, Rect
from parallel.transport.pack import make_source_packer


class _Suspect(NamedTuple):
    """A transfer whose digests differ, as all ranks need to know it."""

    target_rank: int
    target: str
    corner: Rect  # the transfer's rectangle in the engine
    blocks: list[Rect]  # relative to the corner
    digests: list[str]  # the trainer's, of each block
    source: str
    format: str


class ByteProof:
    """Compares the bytes that a plan moves. `named_tensors` are this rank's live tensors; all methods are collective."""

    def __init__(self, plan: SyncPlan, schedule: Schedule, engine: Rank0[Engine]) -> None:
        self._schedule, self._engine, self._rank = schedule, engine, dist.get_rank()
        self._own = [transfer for transfer in plan.transfers if transfer.source_rank == self._rank]

    def hash_chunks(self, named_tensors: dict[str, torch.Tensor]) -> list[str]:
        """Return the digests of this rank's chunks, computed from the live tensors as they are now."""
        own = self._schedule.own
        distinct = list(dict.fromkeys(chunk.sources for chunk in own))  # several engines may get the same bytes
        digests = make_source_packer(named_tensors, own, self._rank).hash_all(distinct)
        digest_of = dict(zip(distinct, digests, strict=True))
        return [digest_of[chunk.sources] for chunk in own]

    def compare_digests(self, named_tensors: dict[str, torch.Tensor], sent: list[str], arrived: Roots) -> None:
        """Raise RunError if the root of an engine rank's chunks differs from the trainer's, or if a digest is missing. The error names the
        first block. `sent`: digests of this rank's chunks."""
        counts = dict(enumerate(self._schedule.counts))
        if (found := {rank: root[0] for rank, root in arrived.items() if root[0]}) != counts:
            raise RunError(f"the sync is not proved: the engine ranks have hashed {found} chunks, the plan has {counts}")
        wrong = [rank for rank, root in self._fold(sent).items() if root[0] != counts[rank] or root != list(arrived[rank])]
        if wrong:
            self.compare_transfers(named_tensors, wrong)
            raise RunError(f"the sync is not proved: the weights of engine rank {wrong[0]} differed for a while")

    def _fold(self, sent: list[str]) -> dict[int, list[int]]:
        """Return the root of all ranks' digests for each engine rank."""
        digests: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for chunk, value in zip(self._schedule.own, sent, strict=True):
            digests[chunk.target].append((self._rank, value))
        count = len(self._schedule.counts)
        sums = sum_over_ranks([number for rank in range(count) for number in fold_digests(rank, digests[rank])])
        return {rank: reduce_root(sums[ROOT_NUMBERS * rank : ROOT_NUMBERS * (rank + 1)]) for rank in range(count)}

    def compare_transfers(self, named_tensors: dict[str, torch.Tensor], engine_ranks: Sequence[int] | None = None) -> None:
        """Hash every transfer, or those to some engine ranks, on both sides at once. Raise RunError for the first difference, naming
        parameter, rank and block."""
        own = [each for each in self._own if engine_ranks is None or each.target_rank in engine_ranks]
        wrong = find_differences(own, self._engine, named_tensors)
        first = gather_from_ranks(own[wrong[0]].target_rank if wrong else -1, int)
        if any(rank >= 0 for rank in first):
            source = min((target, rank) for rank, target in enumerate(first) if target >= 0)[1]
            self._raise_difference(source, self._describe(named_tensors, own[wrong[0]]) if source == self._rank else None)

    def _describe(self, named_tensors: dict[str, torch.Tensor], transfer: Transfer) -> _Suspect:
        blocks = _split_into_blocks(transfer)
        digests = [digest(named_tensors[transfer.source], offset_rect(block, transfer.source_rect)) for block in blocks]
        source = f"{transfer.source} of trainer rank {self._rank}"
        return _Suspect(transfer.target_rank, transfer.target, transfer.target_rect, blocks, digests, source, transfer.format.name)

    def _raise_difference(self, source: int, suspect: _Suspect | None) -> None:
        """Hash a transfer of rank `source` block by block in the engine, and raise RunError for the first block that differs."""
        rank, name, corner, blocks, expected, trainer, format = cast(_Suspect, broadcast_from(source, suspect, _Suspect))

        def find_first_difference(engine: Engine) -> Rect:
            actual = engine.digest_rects({rank: [(name, offset_rect(block, corner)) for block in blocks]})[rank]
            return next((block for block, a, b in zip(blocks, expected, actual, strict=True) if a != b), blocks[0])

        block = offset_rect(self._engine.run(find_first_difference, Rect), corner)
        raise RunError(
            f"the sync is not proved: {name} of engine rank {rank} differs from {trainer}; "
            f"first in rows {block.row}..{block.row + block.rows - 1}, columns {block.col}..{block.col + block.cols - 1} ({format})"
        )


def find_differences(transfers: Sequence[Transfer], engine: Rank0[Engine], named_tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Return the indices of those of this rank's transfers with other bytes in the engine. Both sides hash at once. Collective."""
    asked = gather_on_rank0(json.dumps([(each.target_rank, each.target, *each.target_rect) for each in transfers]).encode())
    with ThreadPoolExecutor(1) as pool:
        on_engine = Rank0(lambda: pool.submit(_digest_on_engine, engine.value, asked))
        sent = digest_all(named_tensors, [(each.source, each.source_rect) for each in transfers])
        answers = Rank0(lambda: [json.dumps(each).encode() for each in on_engine.value.result()])
    arrived = json.loads(scatter_from_rank0(answers.value if asked else []))
    return [index for index, (own, other) in enumerate(zip(sent, arrived, strict=True)) if own != other]


def _digest_on_engine(engine: Engine, asked: Sequence[bytes]) -> list[list[str]]:
    """Return the engine's digests of rectangles (engine rank, name, rectangle), which each trainer rank asks for as JSON."""
    by_sender = [[(rank, (name, Rect(*rect))) for rank, name, *rect in json.loads(text)] for text in asked]
    named_rects: dict[int, list[NamedRect]] = defaultdict(list)
    for rank, named_rect in chain.from_iterable(by_sender):
        named_rects[rank].append(named_rect)
    next_digest = {rank: iter(digests) for rank, digests in engine.digest_rects(named_rects).items()}
    return [[next(next_digest[rank]) for rank, _ in own] for own in by_sender]


def _split_into_blocks(transfer: Transfer) -> list[Rect]:
    """Return a transfer's blocks relative to its corner: single values for scales, tiles of `BLOCK` for unquantized tensors."""
    rows, cols = (1, 1) if transfer.of_scales else transfer.format.block or (BLOCK, BLOCK)
    return cut_rect(transfer.target_rect, rows, cols)


def cut_rect(rect: Rect, rows: int, cols: int) -> list[Rect]:
    """Return the parts of at most these sizes of a rectangle, relative to its corner; 0 stands for the whole rectangle's size."""
    rows, cols = rows or rect.rows, cols or rect.cols
    corners = product(range(0, rect.rows, rows), range(0, rect.cols, cols))
    return [Rect(row, col, min(rows, rect.rows - row), min(cols, rect.cols - col)) for row, col in corners]


def offset_rect(block: Rect, corner: Rect) -> Rect:
    return Rect(corner.row + block.row, corner.col + block.col, block.rows, block.cols)
