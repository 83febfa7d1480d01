"""An engine rank's side of a sync: receive chunks in a thread of its own, so that serving can go on, and hash what was written.

Unstaged, the bytes go straight into the live tensors, so nothing may be served meanwhile. Staged, they go into a second copy of the
weights, and `finish` copies that over the live tensors at memory speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from parallel.chunking import Chunk
from parallel.digest import as_byte_matrix
from parallel.transport import load_transport
from parallel.transport.base import Inbox, Link
from parallel.transport.pack import ChunkPacker, check_targets, make_target_packer

Tensors = Mapping[str, torch.Tensor]
_NOTHING = np.empty(0, np.uint8)


class WeightReceiver:
    """One connection to the trainer."""

    def __init__(self, link: Link, rank: int, chunks: Sequence[Chunk], live: Tensors, staged: bool) -> None:
        """Start to connect. Raise ValueError, before anything is written, if the chunks do not fit the live tensors, or the transport
        cannot be imported."""
        transport = load_transport(link.transport)
        check_targets(make_target_packer(live, chunks), chunks)
        self._chunks, self._timeout = chunks, link.timeout
        self.names = sorted({name for chunk in chunks for name, _ in chunk.targets})
        """Of the live tensors that a sync fills."""
        self._device = next(iter(live.values())).device
        staging = {name: torch.empty_like(live[name]) for name in (self.names if staged else ())}
        self._staging = make_target_packer(staging, chunks) if staged else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-sync", initializer=self._enter_device)
        self._inbox: Future[Inbox] = self._thread.submit(transport.make_inbox, link, link.first + rank, chunks)
        self._received: Future[list[str]] | None = None
        self._reread: Future[list[str]] | None = None

    def start(self, live: Tensors, hashing: bool, places: Sequence[Sequence[int]] | None = None) -> None:
        """Begin to receive one sync's chunks into `live`, the tensors as they are now, or into the second copy.

        `places`: [offset, bytes] of what is sent of each chunk, where that is not the chunk itself but a delta of it (fewer bytes; none
        where nothing differs).
        """
        packer = self._staging or make_target_packer(live, self._chunks)
        sent = self._chunks if places is None else [replace(c, offset=o, nbytes=n) for c, (o, n) in zip(self._chunks, places, strict=True)]
        self._received = self._thread.submit(self._receive, packer, sent, hashing and self._staging is None)

    def finish(self, live: Tensors, hashing: bool) -> list[str]:
        """Wait for the last chunk, and copy what was staged over `live`. Raise the errors of the thread.

        With `hashing`, return one digest per chunk, made from the live tensors right after the chunk was written.
        """
        if self._received is None:
            self._inbox.result(self._timeout)  # raises why the connection failed
            raise ValueError("no sync was started")
        digests = self._received.result(self._timeout)
        self._received = None
        if self._staging is None:
            return digests
        staging, packer = self._staging, make_target_packer(live, self._chunks)
        with torch.inference_mode():
            return [packer.copy(chunk.targets, staging, hashing) for chunk in self._chunks]

    def start_rereading(self, live: Tensors) -> None:
        """Begin to hash `live`, the tensors as they are now, in the thread: serving goes on meanwhile."""
        targets = [chunk.targets for chunk in self._chunks]
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the thread has a stream of its own
        self._reread = self._thread.submit(lambda: make_target_packer(live, self._chunks).hash_all(targets))

    def finish_rereading(self) -> list[str] | None:
        """Return one digest per chunk; None while the thread still hashes. Raise the errors of the thread, and ValueError where nothing
        was begun."""
        if self._reread is None:
            raise ValueError("no rereading was started")
        return self._reread.result() if self._reread.done() else None  # it is asked again where another rank still hashes

    def close(self) -> None:
        """End the connection, so that a waiting sender fails at once, and free the second copy."""
        self._thread.submit(lambda: self._inbox.result().close())
        self._thread.shutdown(wait=False)
        self._staging = None

    def _enter_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _receive(self, packer: ChunkPacker, sent: Sequence[Chunk], hashing: bool) -> list[str]:
        inbox = self._inbox.result()
        digests = []
        try:
            inbox.start([part for part in sent if part.nbytes])
            with torch.inference_mode():
                for chunk, part in zip(self._chunks, sent, strict=True):
                    flat = as_byte_matrix(inbox.receive(part)) if part.nbytes else _NOTHING
                    if part.nbytes == chunk.nbytes:
                        digests.append(packer.unpack(chunk.targets, flat, hashing))
                    else:
                        digests.append(packer.apply(chunk.targets, flat, chunk.nbytes, hashing))
                    if part.nbytes:
                        inbox.release(part)
            inbox.finish()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            return digests
        except BaseException:
            inbox.close()
            raise
