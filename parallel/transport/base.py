"""Interface of a transport: a module with the classes `Outbox`, for trainer ranks, and `Inbox`, for engine ranks, and a `Transport` that
describes it. They hand out flat byte buffers, at most `CHUNKS_IN_FLIGHT` chunks at a time. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from parallel.chunking import Chunk

if TYPE_CHECKING:
    import torch


class TransportSettings(Protocol):
    """Fields of the configuration's section `[sync]`."""

    @property
    def host(self) -> str: ...  # address of the first trainer rank's host
    @property
    def dir(self) -> Path | None: ...  # shared folder; set if the transport `needs_dir`
    @property
    def timeout(self) -> float: ...  # longest wait of one side for the other, in seconds


class Route(NamedTuple):
    """What all ranks know about a sync."""

    sources: tuple[int, ...]  # trainer ranks that send
    targets: tuple[int, ...]  # engine ranks that receive
    largest: int  # bytes of the largest chunk

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Route:
        """Return the route of all ranks' chunks."""
        sources, targets = ({getattr(chunk, side) for chunk in chunks} for side in ("source", "target"))
        return cls(tuple(sorted(sources)), tuple(sorted(targets)), max(chunk.nbytes for chunk in chunks))


class Outbox:
    """A trainer rank's half. Every wait ends after `sync.timeout` with one of the transport's `lost_errors`."""

    address: Any = None  # address for engine ranks and other trainer ranks, as JSON

    def __init__(self, settings: TransportSettings, rank: int, chunks: Sequence[Chunk], route: Route) -> None:
        """`chunks` are those of this rank. A test may pass those of all ranks."""

    def open(self, addresses: Mapping[int, Any]) -> None:
        """Wait until the engine ranks are connected. `addresses`: the address of every trainer rank."""

    def start(self, chunks: Sequence[Chunk]) -> None:
        """Start a sync of these chunks, or of some of them in the same order and with fewer bytes."""

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        """Return a free buffer, uint8 [chunk.nbytes]."""
        raise NotImplementedError

    def send(self, chunk: Chunk) -> None:
        """Send the buffer that was returned last."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until the engine has read all chunks of this sync, or can read them without the sender."""

    def close(self) -> None:
        """Free all resources. Waiting engine ranks fail at once if the transport can signal it. Idempotent."""


class Inbox:
    """An engine rank's half."""

    def __init__(self, link: Link, rank: int, chunks: Sequence[Chunk]) -> None:
        """Connect engine rank `rank`, which will receive `chunks`. Raise OSError or RuntimeError if no trainer answers."""

    def start(self, chunks: Sequence[Chunk]) -> None:
        """Start a sync of these chunks to this rank, as `Outbox.start` does."""

    def receive(self, chunk: Chunk) -> torch.Tensor:
        """Wait for a chunk and return it, uint8 [chunk.nbytes], valid until `release`."""
        raise NotImplementedError

    def release(self, chunk: Chunk) -> None:
        """Allow the chunk's buffer to be reused."""

    def finish(self) -> None:
        """End a sync whose chunks have all been read."""

    def close(self) -> None:
        """Free all resources. Idempotent."""


@dataclass(frozen=True)
class Link:
    """What an engine rank needs to build its inbox; sent as JSON."""

    transport: str  # value of `sync.transport`, so that the engine's process finds a user's own transport
    addresses: dict[str, Any]
    sources: list[int]
    targets: list[int]
    largest: int  # bytes of the largest chunk
    timeout: float  # seconds
    first: int = 0  # number of this engine's first rank; `targets` are numbered over all engines


@dataclass(frozen=True)
class Transport:
    module: str  # module with the classes `Outbox` and `Inbox`
    largest_chunk: int = 16 << 20
    """Bytes. On CPUs, chunks that stay in the cache between writer and reader are faster; GPUs need few launches."""
    devices: tuple[str, ...] = ("cpu", "cuda")  # devices of the weights that it supports
    shares_gpus: bool = True  # whether trainer and engine may be on the same GPU
    one_host: bool = False  # whether trainer and engines must be on one host
    needs_dir: bool = False  # whether `sync.dir` must be set
    lost_errors: tuple[type[Exception], ...] = (OSError,)
    """Errors that an outbox raises for a lost connection. The sync is then repeated with another engine."""

    def make_outbox(self, settings: TransportSettings, rank: int, chunks: Sequence[Chunk], route: Route | None = None) -> Outbox:
        """`route` defaults to that of `chunks`, which then are those of all ranks."""
        return importlib.import_module(self.module).Outbox(settings, rank, chunks, route or Route.of(chunks))

    def make_inbox(self, link: Link, rank: int, chunks: Sequence[Chunk]) -> Inbox:
        return importlib.import_module(self.module).Inbox(link, rank, chunks)
