"""Compares the bytes of trainer and engine: chunk digests first, and if one differs, the digests of single blocks to name the block."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
import torch.distributed as dist

from megatron_rl.distributed import Rank0, broadcast_from, gather_from_ranks
from megatron_rl.errors import RunError
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.plan import SyncPlan
from parallel.digest import digest, digest_all
from parallel.formats import BLOCK
from parallel.reshard import Transfer
from parallel.shards import NamedRect, Rect
from parallel.transport.pack import make_source_packer


class ByteProof:
    """Compares the bytes that a plan moves. `named_tensors` are this rank's live tensors; all methods are collective."""

    def __init__(self, plan: SyncPlan, engine: Rank0[Engine]) -> None:
        self.plan, self._engine, self._rank = plan, engine, dist.get_rank()

    def hash_chunks(self, named_tensors: dict[str, torch.Tensor]) -> dict[int, str]:
        """Return the digests of all ranks' chunks, by chunk number, computed from the live tensors as they are now."""
        numbers_of: dict[tuple[NamedRect, ...], list[int]] = defaultdict(list)  # several engines may get the same bytes
        for number, chunk in enumerate(self.plan.chunks):
            if chunk.source == self._rank:
                numbers_of[chunk.sources].append(number)
        digests = make_source_packer(named_tensors, self.plan.chunks, self._rank).hash_all(list(numbers_of))
        own = {number: digest for numbers, digest in zip(numbers_of.values(), digests, strict=True) for number in numbers}
        return {number: digest for rank in gather_from_ranks(own, dict[int, str]) for number, digest in rank.items()}

    def compare_digests(self, named_tensors: dict[str, torch.Tensor], sent: dict[int, str], arrived: dict[int, list[str]]) -> None:
        """Raise RunError if the digest of a chunk in the engine differs from the trainer's, or if one is missing. The error names the first
        block."""
        counts = Counter(chunk.target for chunk in self.plan.chunks)
        if (found := {rank: len(digests) for rank, digests in arrived.items() if digests}) != counts:
            raise RunError(f"the sync is not proved: the engine ranks have hashed {found} chunks, the plan has {dict(counts)}")
        next_digest = {rank: iter(digests) for rank, digests in arrived.items()}
        for number, chunk in enumerate(self.plan.chunks):
            if not sent[number] or next(next_digest[chunk.target]) != sent[number]:
                self.compare_transfers(named_tensors)
                raise RunError(f"the sync is not proved: {chunk.targets[0][0]} of engine rank {chunk.target} differed for a while")

    def compare_transfers(self, named_tensors: dict[str, torch.Tensor]) -> None:
        """Hash every transfer on both sides at once, and raise RunError for the first difference, naming parameter, rank and block."""
        transfers = self.plan.transfers
        with ThreadPoolExecutor(1) as pool:
            on_engine = Rank0(lambda: pool.submit(_digest_on_engine, self._engine.value, transfers))
            indices = [index for index, transfer in enumerate(transfers) if transfer.source_rank == self._rank]
            digests = digest_all(named_tensors, [(transfers[index].source, transfers[index].source_rect) for index in indices])
            by_index = gather_from_ranks(dict(zip(indices, digests, strict=True)), dict[int, str])
            sent = {index: value for rank_digests in by_index for index, value in rank_digests.items()}
            arrived = on_engine.run(lambda digests: digests.result(), list[str])
        for index, transfer in enumerate(transfers):
            if sent[index] != arrived[index]:
                self._raise_difference(named_tensors, transfer)

    def _raise_difference(self, named_tensors: dict[str, torch.Tensor], transfer: Transfer) -> None:
        """Hash a transfer block by block on both sides, and raise RunError for the first block that differs."""
        blocks = _split_into_blocks(transfer)
        own = list[str]()
        if self._rank == transfer.source_rank:
            own = [digest(named_tensors[transfer.source], _offset_rect(block, transfer.source_rect)) for block in blocks]
        expected = broadcast_from(transfer.source_rank, own, list[str])

        def find_first_difference(engine: Engine) -> Rect:
            named_rects = [(transfer.target, _offset_rect(block, transfer.target_rect)) for block in blocks]
            actual = engine.digest_rects({transfer.target_rank: named_rects})[transfer.target_rank]
            return next((block for block, a, b in zip(blocks, expected, actual, strict=True) if a != b), blocks[0])

        block = _offset_rect(self._engine.run(find_first_difference, Rect), transfer.target_rect)
        raise RunError(
            f"the sync is not proved: {transfer.target} of engine rank {transfer.target_rank} differs from {transfer.source} "
            f"of trainer rank {transfer.source_rank}; first in rows {block.row}..{block.row + block.rows - 1}, "
            f"columns {block.col}..{block.col + block.cols - 1} ({transfer.format.name})"
        )


def _digest_on_engine(engine: Engine, transfers: Sequence[Transfer]) -> list[str]:
    """Return the engine's digests of all transfers' target rectangles, in the order of the transfers."""
    named_rects: dict[int, list[NamedRect]] = defaultdict(list)
    for transfer in transfers:
        named_rects[transfer.target_rank].append((transfer.target, transfer.target_rect))
    next_digest = {rank: iter(digests) for rank, digests in engine.digest_rects(named_rects).items()}
    return [next(next_digest[transfer.target_rank]) for transfer in transfers]


def _split_into_blocks(transfer: Transfer) -> list[Rect]:
    """Return a transfer's blocks relative to its corner: single values for scales, tiles of `BLOCK` for unquantized tensors."""
    rect = transfer.target_rect
    rows, cols = (1, 1) if transfer.of_scales else transfer.format.block or (BLOCK, BLOCK)
    cols = cols or rect.cols
    corners = product(range(0, rect.rows, rows), range(0, rect.cols, cols))
    return [Rect(row, col, min(rows, rect.rows - row), min(cols, rect.cols - col)) for row, col in corners]


def _offset_rect(block: Rect, corner: Rect) -> Rect:
    return Rect(corner.row + block.row, corner.col + block.col, block.rows, block.cols)
