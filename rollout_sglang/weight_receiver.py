"""Engine side of a sync: receives chunks in a background thread and hashes what was written. Unstaged, bytes are written into the live
tensors, so nothing may be served meanwhile; staged, into a second copy, which `finish` copies over the live tensors."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch

from parallel.chunking import Chunk
from parallel.digest import as_byte_matrix
from parallel.proof_root import fold_digests
from parallel.transport import load_transport
from parallel.transport.base import Inbox, Link
from parallel.transport.pack import ChunkPacker, check_targets, make_target_packer

Tensors = Mapping[str, torch.Tensor]
_NOTHING = np.empty(0, np.uint8)
_WAIT_SECONDS = 1.0
"""How long a rank waits for the last chunk before it answers that it is not there, so that it answers pings meanwhile."""


class WeightReceiver:
    def __init__(self, link: Link, rank: int, chunks: Sequence[Chunk], live: Tensors, staged: bool) -> None:
        """Start connecting to the trainer. Raise ValueError, before anything is written, if the chunks do not fit the live tensors."""
        transport = load_transport(link.transport)
        check_targets(make_target_packer(live, chunks), chunks)
        self._chunks, self._timeout, self._transport = chunks, link.timeout, link.transport
        self._arrived_at = time.monotonic()  # when the last chunk arrived, or the sync started
        names = {name for chunk in chunks for name, _ in chunk.targets}  # live tensors that a sync fills
        self._device = next(iter(live.values())).device
        staging = {name: torch.empty_like(live[name]) for name in (names if staged else ())}
        self._staging = make_target_packer(staging, chunks) if staged else None
        enter = (lambda: torch.cuda.set_device(self._device)) if self._device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megatron-rl-sync", initializer=enter)
        self._number = link.first + rank  # over all engines
        self._inbox: Future[Inbox] = self._thread.submit(transport.make_inbox, link, self._number, chunks)
        self._received: Future[list[str]] | None = None
        self._copied: list[str] = []  # digests of what was copied from the second copy
        self._reread: Future[list[str]] | None = None

    def start(self, live: Tensors, hashing: bool, places: Sequence[Sequence[int]] | None = None) -> None:
        """Start receiving the chunks of one sync into `live`, the current tensors, or into the second copy. `places`: [offset, bytes] of
        the transferred part of each chunk if deltas are sent. A delta has fewer bytes than its chunk, or none."""
        self._arrived_at = time.monotonic()
        packer, self._copied = self._staging or make_target_packer(live, self._chunks), []
        sent = self._chunks if places is None else [replace(c, offset=o, nbytes=n) for c, (o, n) in zip(self._chunks, places, strict=True)]
        self._received = self._thread.submit(self._receive, packer, sent, hashing and self._staging is None)

    def finish(self, live: Tensors, hashing: bool) -> list[int] | None:
        """Wait a moment for the last chunk. Return None if it has not arrived. Otherwise copy staged weights over `live`, once. Raise the
        errors of the thread. Return the root of the digests (`parallel.proof_root`), with `hashing` computed from the live tensors right
        after each chunk was written."""
        if self._received is None:
            self._inbox.result(self._timeout)  # raises the error if the connection failed
            raise ValueError("no sync was started")
        if not wait([self._received], _WAIT_SECONDS).done:
            if (silent := time.monotonic() - self._arrived_at) > 2 * self._timeout:  # a transport itself ends its waits after `timeout`
                raise TimeoutError(f"sync.transport = {self._transport!r}: no chunk arrived for {silent:.0f} s")
            return None
        digests = self._received.result()
        if self._staging is not None and not self._copied:
            staging, packer = self._staging, make_target_packer(live, self._chunks)
            with torch.inference_mode():
                self._copied = [packer.copy(chunk.targets, staging, hashing) for chunk in self._chunks]
        return self._fold(digests if self._staging is None else self._copied)  # another rank may still receive; this one is asked again

    def start_rereading(self, live: Tensors) -> None:
        """Start hashing `live`, the current tensors, in the thread while serving continues."""
        targets = [chunk.targets for chunk in self._chunks]
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # the thread uses its own stream
        self._reread = self._thread.submit(lambda: make_target_packer(live, self._chunks).hash_all(targets))

    def finish_rereading(self) -> list[int] | None:
        """Return the root of the digests, or None while the thread is hashing. Raise its errors, or ValueError if nothing was started."""
        if self._reread is None:
            raise ValueError("no rereading was started")
        return self._fold(self._reread.result()) if self._reread.done() else None  # another rank may still hash

    def _fold(self, digests: list[str]) -> list[int]:
        return fold_digests(self._number, ((chunk.source, digest) for chunk, digest in zip(self._chunks, digests, strict=True)))

    def close(self) -> None:
        """Close the connection, so that a waiting sender fails immediately, and free the second copy."""
        self._thread.submit(lambda: self._inbox.result().close())
        self._thread.shutdown(wait=False)
        self._staging = None

    def _receive(self, packer: ChunkPacker, sent: Sequence[Chunk], hashing: bool) -> list[str]:
        inbox = self._inbox.result()
        digests = []
        try:
            inbox.start([part for part in sent if part.nbytes])
            with torch.inference_mode():
                for chunk, part in zip(self._chunks, sent, strict=True):
                    flat = as_byte_matrix(inbox.receive(part)) if part.nbytes else _NOTHING
                    self._arrived_at = time.monotonic()
                    is_whole = part.nbytes == chunk.nbytes
                    digests.append(
                        packer.unpack(chunk.targets, flat, hashing)
                        if is_whole
                        else packer.apply(chunk.targets, flat, chunk.nbytes, hashing)
                    )
                    if part.nbytes:
                        inbox.release(part)
            inbox.finish()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            return digests
        except BaseException:
            inbox.close()
            raise
