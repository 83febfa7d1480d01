"""Transports: how chunks get from trainer ranks to engine ranks. One short file each, both halves side by side.

    shared_memory   one host: a ring of buffers in anonymous shared memory
    process_group   any hosts: torch's point-to-point sends, NCCL on GPUs and gloo on CPUs
    gloo            any hosts: the same through the host's memory, also between processes that share a GPU
    cuda_ipc        one host, CUDA: a ring of buffers in the sender's device memory, opened by the receiver
    disk            any hosts that share a folder

A trainer rank holds an `Outbox`, an engine rank an `Inbox`. Neither knows tensors; they hand out flat buffers of bytes, never more
than `CHUNKS_IN_FLIGHT` chunks at a time, and what goes into them is `chunks.pack`'s and `chunks.unpack`'s affair.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from parallel.chunking import Chunk

GROUPS = ("process_group", "gloo")
"""Those that are torch's process groups."""


class TransportSettings(Protocol):
    """What a transport must be told; the configuration's section `[sync]` has these fields."""

    @property
    def transport(self) -> str:
        """Name of the module in this package."""

    @property
    def host(self) -> str:
        """Process groups: address of the first trainer rank's host."""

    @property
    def dir(self) -> Path | None:
        """disk: the shared folder."""

    @property
    def timeout(self) -> float:
        """Seconds that one side waits for the other."""


class Outbox(Protocol):
    """A trainer rank's half. All waits are bounded by `sync.timeout` and raise OSError or RuntimeError."""

    address: Any
    """What the engine ranks and the other trainer ranks must know to find it; JSON."""

    def open(self, addresses: Mapping[int, Any]) -> None:
        """Waits until the engine ranks are connected. `addresses` holds every trainer rank's."""

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        """uint8 [chunk.nbytes], free to be written."""

    def send(self, chunk: Chunk) -> None:
        """Hands over the buffer that was given out last."""

    def finish(self) -> None:
        """Returns when all chunks of this sync are taken, or lie where the engine takes them."""

    def close(self) -> None:
        """Frees everything; an engine rank that still waits then fails at once where the transport can tell it. Safe to call twice."""


class Inbox(Protocol):
    """An engine rank's half."""

    def receive(self, chunk: Chunk) -> torch.Tensor:
        """uint8 [chunk.nbytes], valid until `release`."""

    def release(self, chunk: Chunk) -> None:
        """The buffer may be used again."""

    def finish(self) -> None:
        """All chunks of this sync are read."""

    def close(self) -> None:
        """Frees everything; safe to call twice."""


@dataclass(frozen=True)
class Link:
    """What an engine rank needs to build its inbox; travels as JSON."""

    transport: str
    addresses: dict[str, Any]
    sources: list[int]
    targets: list[int]
    largest: int
    """Bytes of the largest chunk."""
    timeout: float
    """Seconds."""
    first: int = 0
    """Number of this engine's first rank; `targets` are numbered through all engines."""


def make_outbox(settings: TransportSettings, rank: int, chunks: Sequence[Chunk]) -> Outbox:
    """The outbox of trainer rank `rank`; `chunks` are those of all ranks."""
    return importlib.import_module(f"parallel.transport.{settings.transport}").Outbox(settings, rank, chunks)


def make_inbox(link: Link, rank: int, chunks: Sequence[Chunk]) -> Inbox:
    """The inbox of engine rank `rank`, which will receive `chunks`. Raises OSError or RuntimeError when the trainer does not come."""
    return importlib.import_module(f"parallel.transport.{link.transport}").Inbox(link, rank, chunks)
