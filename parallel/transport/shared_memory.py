"""Shared memory of one host: a ring in an anonymous memory file, which vanishes with the processes that hold it."""

from __future__ import annotations

import mmap
import os

import torch

from parallel.transport.ring import RingInbox, RingOutbox


class Outbox(RingOutbox):
    def make_ring(self, nbytes: int) -> tuple[torch.Tensor, list[int], bytes]:
        descriptor = os.memfd_create("megatron-rl-ring")
        os.posix_fallocate(descriptor, 0, nbytes)  # too little memory is an error here, not a crash later
        return _map(descriptor, nbytes), [descriptor], b"memfd"


class Inbox(RingInbox):
    def open_ring(self, descriptors: list[int], description: bytes, nbytes: int) -> torch.Tensor:
        return _map(descriptors[0], nbytes)


def _map(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)  # unmapped with its last view
