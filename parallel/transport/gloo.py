"""`process_group` by gloo, through the host's memory wherever the weights are.

For trainer and engines that share GPUs on several nodes: NCCL refuses a group that contains a GPU twice. On a GPU a chunk is packed and
unpacked there, and is copied to the host or back in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parallel.chunking import Chunk
from parallel.transport import process_group
from parallel.transport.base import Link, TransportSettings


class Outbox(process_group.Outbox):
    """See `parallel.transport.base.Outbox`."""

    on_device = False

    def __init__(self, settings: TransportSettings, rank: int, chunks: Sequence[Chunk]) -> None:
        super().__init__(settings, rank, chunks)
        self._packed: torch.Tensor | None = None

    def open(self, addresses: Mapping[int, Any]) -> None:
        super().open(addresses)
        self._packed = make_gpu_buffer(self._size) if self._buffers else None

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        flat = super().buffer(chunk)
        return flat if self._packed is None else self._packed[: chunk.nbytes]

    def send(self, chunk: Chunk) -> None:
        if self._packed is not None:
            self._next(chunk).copy_(self._packed[: chunk.nbytes])
        super().send(chunk)

    def close(self) -> None:
        super().close()
        self._packed = None


class Inbox(process_group.Inbox):
    """See `parallel.transport.base.Inbox`."""

    on_device = False

    def __init__(self, link: Link, rank: int, chunks: Sequence[Chunk]) -> None:
        super().__init__(link, rank, chunks)
        self._packed = make_gpu_buffer(link.largest)

    def receive(self, chunk: Chunk) -> torch.Tensor:
        flat = super().receive(chunk)
        return flat if self._packed is None else self._packed[: chunk.nbytes].copy_(flat)


def make_gpu_buffer(nbytes: int) -> torch.Tensor | None:
    """Return a buffer in the GPU's memory; None where there is no GPU."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() else None
