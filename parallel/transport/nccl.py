"""NCCL for the sync. A lost peer raises an error in the call that waits for it, as with gloo, so that another engine can replace it.

By default NCCL waits for a lost peer forever, and torch's watchdog then ends the process. Written from torch 2.14's sources; not run on a
GPU yet.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"  # torch's watchdog aborts the communicators of a failed group without ending the process
_POLL_SECONDS = 0.001


class NcclGroup:
    """Point-to-point transfers over NCCL."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        """Wait until every member has joined, because NCCL would wait for a missing member forever. `timeout`: seconds, of every wait."""
        self._timeout = timeout
        store.set(f"joined {rank}", "")
        store.wait([f"joined {member}" for member in range(size)], timedelta(seconds=timeout))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        before = os.environ.get(_ERROR_HANDLING)
        os.environ[_ERROR_HANDLING] = _CLEAN_UP_ONLY  # read by the constructor; other groups keep their setting
        try:
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            os.environ.pop(_ERROR_HANDLING)
            if before is not None:
                os.environ[_ERROR_HANDLING] = before

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> NcclTransfer:
        return NcclTransfer(self._group, self._group.send(tensors, peer, tag), self._timeout)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> NcclTransfer:
        return NcclTransfer(self._group, self._group.recv(tensors, peer, tag), self._timeout)

    def abort(self) -> None:
        """End all transfers, for which the GPU would otherwise wait forever."""
        self._group.abort()


class NcclTransfer:
    """A transfer that was started on the GPU."""

    def __init__(self, group: Any, work: Any, timeout: float) -> None:
        self._group, self._work, self._timeout = group, work, timeout

    def wait(self) -> None:
        """Wait until the transfer is done. Raise RuntimeError if it fails or times out."""
        deadline = time.monotonic() + self._timeout
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"its peer moved no chunk within {self._timeout:g} s (sync.timeout)")
            time.sleep(_POLL_SECONDS)
        if (error := self._group.get_error()).name != "SUCCESS":
            raise RuntimeError(f"NCCL reports {error.name}")
        self._work.wait()  # only orders the streams
