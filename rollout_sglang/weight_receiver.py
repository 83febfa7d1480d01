"""An engine rank's side of a sync: receives chunks in a thread of its own, so that serving can go on, and hashes what it wrote.

Unstaged, the bytes go straight into the live tensors: nothing may be served meanwhile. Staged, they go into a second copy of the
weights, and `finish` copies that over the live tensors at memory speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from parallel.chunking import Chunk
from parallel.digest import as_byte_matrix
from parallel.transport.base import Inbox, Link, make_inbox
from parallel.transport.pack import ChunkPacker, check_targets, make_target_packer

Tensors = Mapping[str, torch.Tensor]


class WeightReceiver:
    """One connection to the trainer."""

    def __init__(self, link: Link, rank: int, chunks: Sequence[Chunk], live: Tensors, staged: bool) -> None:
        """Starts to connect. Raises ValueError, before anything is written, where the chunks do not fit the live tensors."""
        check_targets(make_target_packer(live, chunks), chunks)
        self._chunks, self._timeout = chunks, link.timeout
        self._device = next(iter(live.values())).device
        names = sorted({name for chunk in chunks for name, _ in chunk.targets}) if staged else []
        staging = {name: torch.empty_like(live[name]) for name in names}
        self._staging = make_target_packer(staging, chunks) if staged else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-sync", initializer=self._enter_device)
        self._inbox: Future[Inbox] = self._thread.submit(make_inbox, link, link.first + rank, chunks)
        self._received: Future[list[str]] | None = None

    def start(self, live: Tensors, hashing: bool) -> None:
        """Begins to receive one sync's chunks into `live`, the tensors as they are now, or into the second copy."""
        into = self._staging or make_target_packer(live, self._chunks)
        self._received = self._thread.submit(self._receive, into, hashing and self._staging is None)

    def finish(self, live: Tensors, hashing: bool) -> list[str]:
        """Waits for the last chunk, and copies what was staged over `live`. Raises what went wrong in the thread.

        Where `hashing`, returns one digest per chunk, made from the live tensors right after the chunk was written.
        """
        if self._received is None:
            self._inbox.result(self._timeout)  # tells why the connection failed
            raise ValueError("no sync was started")
        digests = self._received.result(self._timeout)
        self._received = None
        if self._staging is None:
            return digests
        staging, memory = self._staging, make_target_packer(live, self._chunks)
        with torch.inference_mode():
            return [memory.copy(chunk.targets, staging, hashing) for chunk in self._chunks]

    def close(self) -> None:
        """Ends the connection, so that a sender that waits is told, and frees the second copy."""
        self._thread.submit(lambda: self._inbox.result().close())
        self._thread.shutdown(wait=False)
        self._staging = None

    def _enter_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _receive(self, into: ChunkPacker, hashing: bool) -> list[str]:
        inbox = self._inbox.result()
        digests = []
        try:
            with torch.inference_mode():
                for chunk in self._chunks:
                    digests.append(into.unpack(chunk.targets, as_byte_matrix(inbox.receive(chunk)), hashing))
                    inbox.release(chunk)
            inbox.finish()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            return digests
        except BaseException:
            inbox.close()
            raise
