"""A folder that trainer and engine both see: one file per trainer rank and sync, and a manifest that is written last.

An engine rank maps a file as soon as its manifest is there, so it never reads one that is not whole. Works across hosts; the folder
holds one sync's bytes at a time.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from parallel.chunking import Chunk
from parallel.transport.base import Link, TransportSettings

_POLL_SECONDS = 0.01


class Outbox:
    """See `parallel.transport.base.Outbox`."""

    def __init__(self, settings: TransportSettings, rank: int, chunks: Sequence[Chunk]) -> None:
        assert settings.dir is not None  # check_transport saw to it
        settings.dir.mkdir(parents=True, exist_ok=True)
        mine = [chunk.nbytes for chunk in chunks if chunk.source == rank]
        self._total = sum(mine)
        self._buffer = torch.empty(max(mine, default=0), dtype=torch.uint8)
        self._stem = settings.dir.resolve() / f"sync-{secrets.token_hex(4)}-rank{rank}"
        self.address: Any = str(self._stem)
        self._file: BinaryIO | None = None
        self._round = 0

    def open(self, addresses: Mapping[int, Any]) -> None:
        pass

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        if self._file is None:
            self._remove_old()
            self._file = open(_data(self._stem, self._round), "wb", buffering=0)  # noqa: SIM115 - closed in finish
        return self._buffer[: chunk.nbytes]

    def send(self, chunk: Chunk) -> None:
        assert self._file is not None
        rest = self._buffer[: chunk.nbytes].numpy().data
        while rest:
            rest = rest[self._file.write(rest) :]

    def finish(self) -> None:
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        unfinished = self._stem.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"bytes": self._total}))
        os.replace(unfinished, _manifest(self._stem, self._round))
        self._round += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._remove_old()

    def _remove_old(self) -> None:
        """The engine has read these, or will never."""
        for path in self._stem.parent.glob(f"{self._stem.name}*"):
            path.unlink(missing_ok=True)


class Inbox:
    """See `parallel.transport.base.Inbox`."""

    def __init__(self, link: Link, rank: int, chunks: Sequence[Chunk]) -> None:
        self._link, self._round = link, 0
        self._files: dict[int, torch.Tensor] = {}

    def receive(self, chunk: Chunk) -> torch.Tensor:
        if chunk.source not in self._files:
            self._files[chunk.source] = self._map(Path(self._link.addresses[str(chunk.source)]))
        return self._files[chunk.source][chunk.offset : chunk.offset + chunk.nbytes]

    def release(self, chunk: Chunk) -> None:
        pass

    def finish(self) -> None:
        self._files.clear()
        self._round += 1

    def close(self) -> None:
        self._files.clear()

    def _map(self, stem: Path) -> torch.Tensor:
        data, manifest = _data(stem, self._round), _manifest(stem, self._round)
        deadline = time.monotonic() + self._link.timeout
        while not manifest.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{manifest} did not appear within {self._link.timeout:g} s (sync.timeout)")
            time.sleep(_POLL_SECONDS)
        expected, found = json.loads(manifest.read_text())["bytes"], data.stat().st_size
        if expected != found:
            raise OSError(f"{data} holds {found} bytes, its manifest says {expected}")
        with open(data, "rb") as file:
            # a private map: torch wants writable memory, and nothing is written
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _data(stem: Path, turn: int) -> Path:
    return stem.with_name(f"{stem.name}-{turn}.bin")


def _manifest(stem: Path, turn: int) -> Path:
    return stem.with_name(f"{stem.name}-{turn}.json")
