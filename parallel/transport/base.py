"""The interface of a transport: a module with two classes, `Outbox` and `Inbox`, and a `Transport` that says what they need. No torch.

A trainer rank holds an `Outbox`, an engine rank an `Inbox`. Neither knows tensors; they hand out flat buffers of bytes, never more
than `CHUNKS_IN_FLIGHT` chunks at a time, which `transport.pack.ChunkPacker` fills and reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from parallel.chunking import Chunk

if TYPE_CHECKING:
    import torch


class TransportSettings(Protocol):
    """The settings of a transport; the configuration's section `[sync]` has these fields."""

    @property
    def host(self) -> str:
        """Address of the first trainer rank's host."""

    @property
    def dir(self) -> Path | None:
        """The shared folder; set where the transport `needs_dir`."""

    @property
    def timeout(self) -> float:
        """Seconds that one side waits for the other."""


class Outbox:
    """A trainer rank's half. All waits end by `sync.timeout`, with one of the transport's `lost_errors`."""

    address: Any = None
    """Where engine ranks and other trainer ranks find it; JSON."""

    def __init__(self, settings: TransportSettings, rank: int, chunks: Sequence[Chunk]) -> None:
        """`chunks` are those of all ranks."""

    def open(self, addresses: Mapping[int, Any]) -> None:
        """Wait until the engine ranks are connected. `addresses` holds every trainer rank's."""

    def start(self, chunks: Sequence[Chunk]) -> None:
        """Begin a sync of these chunks of all ranks: those of the connection, or some of them, in their order and with fewer bytes."""

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        """Return uint8 [chunk.nbytes], free to be written."""
        raise NotImplementedError

    def send(self, chunk: Chunk) -> None:
        """Send the buffer that was handed out last."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until the engine has taken all chunks of this sync, or can take them without the sender."""

    def close(self) -> None:
        """Free everything; an engine rank that still waits fails at once where the transport can signal it. Safe to call twice."""


class Inbox:
    """An engine rank's half."""

    def __init__(self, link: Link, rank: int, chunks: Sequence[Chunk]) -> None:
        """`rank` will receive `chunks`. Raise OSError or RuntimeError without a trainer."""

    def start(self, chunks: Sequence[Chunk]) -> None:
        """Begin a sync of these chunks to this rank, as `Outbox.start`."""

    def receive(self, chunk: Chunk) -> torch.Tensor:
        """Wait for a chunk and return it, uint8 [chunk.nbytes], valid until `release`."""
        raise NotImplementedError

    def release(self, chunk: Chunk) -> None:
        """Allow the chunk's buffer to be used again."""

    def finish(self) -> None:
        """End a sync, all of whose chunks are read."""

    def close(self) -> None:
        """Free everything; safe to call twice."""


@dataclass(frozen=True)
class Link:
    """What an engine rank needs to build its inbox; travels as JSON."""

    transport: str
    """As `sync.transport` names it, so that the engine's process finds a user's own."""
    addresses: dict[str, Any]
    sources: list[int]
    targets: list[int]
    largest: int
    """Bytes of the largest chunk."""
    timeout: float
    """Seconds."""
    first: int = 0
    """Number of this engine's first rank; `targets` are numbered over all engines."""


@dataclass(frozen=True)
class Transport:
    """What `sync.transport` names."""

    module: str
    """Holds the classes `Outbox` and `Inbox`."""
    largest_chunk: int = 16 << 20
    """Bytes. On a CPU, what stays in the cache between writer and reader moves faster; a GPU wants few launches."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Where the weights may be."""
    shares_gpus: bool = True
    """Works where trainer and engine are on the same GPU."""
    one_host: bool = False
    """Works only where trainer and engines are on one host."""
    needs_dir: bool = False
    """Works only with `sync.dir`."""
    lost_errors: tuple[type[Exception], ...] = (OSError,)
    """What an outbox raises where the connection is lost; the sync is then repeated with another engine."""

    def make_outbox(self, settings: TransportSettings, rank: int, chunks: Sequence[Chunk]) -> Outbox:
        return importlib.import_module(self.module).Outbox(settings, rank, chunks)

    def make_inbox(self, link: Link, rank: int, chunks: Sequence[Chunk]) -> Inbox:
        return importlib.import_module(self.module).Inbox(link, rank, chunks)
