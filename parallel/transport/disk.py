"""Shared folder: one file per trainer rank and sync, and a manifest that is written last. An engine rank maps a file once its manifest
exists, so it never reads an incomplete file. Works across hosts. The folder holds the bytes of one sync at a time."""

import json
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from parallel.chunking import Chunk
from parallel.transport import base

_POLL_SECONDS = 0.01


class Outbox(base.Outbox):
    def __init__(self, settings: base.TransportSettings, rank: int, chunks: Sequence[Chunk], route: base.Route) -> None:
        assert settings.dir is not None  # ensured by check_transport
        settings.dir.mkdir(parents=True, exist_ok=True)
        self._rank, self._total, self._sync = rank, 0, 0
        self._buffer = torch.empty(max((chunk.nbytes for chunk in chunks if chunk.source == rank), default=0), dtype=torch.uint8)
        self._stem = settings.dir.resolve() / f"sync-{secrets.token_hex(4)}-rank{rank}"
        self.address = str(self._stem)
        self._file: BinaryIO | None = None

    def start(self, chunks: Sequence[Chunk]) -> None:
        self._sync += 1
        self._total = sum(chunk.nbytes for chunk in chunks if chunk.source == self._rank)

    def buffer(self, chunk: Chunk) -> torch.Tensor:
        if self._file is None:
            self._remove_files()  # the engine has read earlier syncs, or never will
            self._file = open(_path(self._stem, self._sync, "bin"), "wb", buffering=0)  # noqa: SIM115 - closed in finish
        return self._buffer[: chunk.nbytes]

    def send(self, chunk: Chunk) -> None:
        assert self._file is not None
        unwritten = self._buffer[: chunk.nbytes].numpy().data
        while unwritten:
            unwritten = unwritten[self._file.write(unwritten) :]

    def finish(self) -> None:
        if self._file is None:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        unfinished = self._stem.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"bytes": self._total}), encoding="utf-8")
        os.replace(unfinished, _path(self._stem, self._sync, "json"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._remove_files()

    def _remove_files(self) -> None:
        for path in self._stem.parent.glob(f"{self._stem.name}*"):
            path.unlink(missing_ok=True)


class Inbox(base.Inbox):
    def __init__(self, link: base.Link, rank: int, chunks: Sequence[Chunk]) -> None:
        self._link, self._sync = link, 0
        self._files: dict[int, torch.Tensor] = {}

    def start(self, chunks: Sequence[Chunk]) -> None:
        self._sync += 1

    def receive(self, chunk: Chunk) -> torch.Tensor:
        if chunk.source not in self._files:
            self._files[chunk.source] = self._map(Path(self._link.addresses[str(chunk.source)]))
        return self._files[chunk.source][chunk.offset : chunk.offset + chunk.nbytes]

    def finish(self) -> None:
        self._files.clear()

    def close(self) -> None:
        self._files.clear()

    def _map(self, stem: Path) -> torch.Tensor:
        data, manifest = _path(stem, self._sync, "bin"), _path(stem, self._sync, "json")
        deadline = time.monotonic() + self._link.timeout
        while not manifest.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{manifest} did not appear within {self._link.timeout:g} s (sync.timeout)")
            time.sleep(_POLL_SECONDS)
        expected, actual = json.loads(manifest.read_text(encoding="utf-8"))["bytes"], data.stat().st_size
        if expected != actual:
            raise OSError(f"{data} holds {actual} bytes, its manifest says {expected}")
        with open(data, "rb") as file:
            # copy-on-write, because torch requires writable memory; nothing is written
            return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _path(stem: Path, sync: int, suffix: str) -> Path:
    """Return the path of a sync's data (.bin) or manifest (.json)."""
    return stem.with_name(f"{stem.name}-{sync}.{suffix}")
