"""One checkpoint on its way to the disk, written by a thread while training goes on.

Megatron plans and finishes a save together with all ranks; what lies between, writing this rank's own files, needs nobody else. Megatron
leaves that to forked processes and a helper process, which outlives a killed trainer; a thread of this process does it here, with
Megatron's own writing function, on a copy of the tensors in host memory.
"""

from __future__ import annotations

import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.distributed import gather_from_ranks, raise_on_all_ranks, run_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.mcore.checkpoint.folder import checksum_files


class AsyncSave:
    """A sharded state dict that is being written into the empty folder `parent/mcore`. All methods but the thread's are collective.

    Raises RunError on every rank where the disk has no room for it.
    """

    def __init__(self, parent: Path, sharded: dict[str, Any]) -> None:
        self._parent, self._error = parent, ""
        self.files: dict[str, dict[str, Any]] = {}
        """Once written: this rank's files, by their path relative to `parent`, with size and hash."""
        results: queue.Queue[Any] = queue.Queue()
        filesystem_async._results_queue = results  # else Megatron starts its helper process to hold one
        try:
            self._request = dist_checkpointing.save(sharded, str(parent / "mcore"), async_sharded_save=True)
        finally:
            filesystem_async._results_queue = None
        write: Any = self._request.async_fn  # None where this rank has nothing to write
        buckets = [] if write is None else self._request.async_fn_args[1]
        self._check_room(buckets)
        copies = [_copied(bucket) for bucket in buckets]
        self._thread = threading.Thread(target=self._write, args=(copies, write and write.args[0], results), daemon=True)
        self._thread.start()

    def _check_room(self, buckets: list[Any]) -> None:
        own = sum(tensor.nbytes for *_, (_, tensors) in buckets for _, tensor in tensors)
        wanted = sum(gather_from_ranks(own))

        def check() -> None:
            free = shutil.disk_usage(self._parent).free
            if free < wanted:
                raise RunError(f"it takes {wanted / 2**20:,.0f} MiB and the disk has {free / 2**20:,.0f} MiB left")

        run_on_rank0(check)

    def _write(self, buckets: list[Any], transforms: Any, results: queue.Queue[Any]) -> None:
        try:
            written: dict[int, Any] = {}
            for number, bucket in enumerate(buckets):
                found: queue.Queue[Any] = queue.Queue()
                running: queue.Queue[int] = queue.Queue()
                running.put(number)
                FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, found, running, use_fsync=True)
                _, written[number] = found.get_nowait()
                if isinstance(written[number], BaseException):
                    raise written[number]
            if buckets:
                results.put(written)
            self.files = checksum_files(self._parent, [f"mcore/{bucket[1]}" for bucket in buckets])
        except BaseException as error:
            self._error = f"rank {dist.get_rank()}: {_reason(error)}"

    def is_written(self) -> bool:
        """Whether every rank has written its files, or failed to."""
        return not any(gather_from_ranks(self._thread.is_alive()))

    def finish(self) -> None:
        """Waits for all ranks and completes the folder. Raises RunError on every rank where one could not write."""
        self._thread.join()
        raise_on_all_ranks(RunError(self._error) if self._error else None)
        try:
            for complete in self._request.finalize_fns:
                complete()
        except CheckpointException as error:  # no Exception
            raise RunError(str(error)) from None


def _reason(error: BaseException) -> str:
    """What the disk said, where it is behind the error: torch's writer stumbles over it once more."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return f"{cause.strerror or cause}" if isinstance(cause, OSError) else f"{type(error).__name__}: {error}"


def _copied(bucket: Any) -> Any:
    """The same bucket with its tensors copied to host memory: the next optimizer step changes the live ones."""
    path, name, (texts, tensors) = bucket
    return path, name, (texts, [(item, tensor.to("cpu", copy=True)) for item, tensor in tensors])
