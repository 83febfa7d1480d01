"""Asynchronous checkpoint save: a thread writes the files while training continues.

Megatron plans and finalizes a save collectively; in between, every rank writes its own files. Megatron would write them in a process of its
own, with a helper process that outlives a killed trainer. Here a thread calls Megatron's writing function on host copies instead.
"""

import queue
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.distributed import gather_from_ranks, raise_on_all_ranks, run_on_rank0
from megatron_rl.errors import RunError, find_os_error
from megatron_rl.mcore.checkpoint.folder import check_room, checksum_files


class OtherFiles(Protocol):
    """This rank's checkpoint files besides its sharded tensors."""

    @property
    def nbytes(self) -> int: ...

    def write(self, to: Path) -> list[str]:
        """Write the files into the checkpoint's folder; return their relative paths. Raise OSError."""


class AsyncSave:
    """Saves a sharded state dict into the empty folder `parent/mcore`. All public methods are collective.

    Args:
        live: tensors that training will modify (or whose views are saved), so that they must be copied.
        others: further files that this rank's thread writes.

    Raises RunError on every rank if the disk lacks space.
    """

    def __init__(self, parent: Path, sharded: dict[str, Any], live: Iterable[torch.Tensor], others: Sequence[OtherFiles] = ()) -> None:
        self._parent, self._error, self._others = parent, "", others
        self.other_bytes = sum(other.nbytes for other in others)
        self.files: dict[str, dict[str, Any]] = {}  # relative path -> size and hash of this rank's files; filled when they are written
        results: queue.Queue[Any] = queue.Queue()
        filesystem_async._results_queue = results  # otherwise Megatron starts a helper process to create a queue
        try:
            self._request = dist_checkpointing.save(sharded, str(parent / "mcore"), async_sharded_save=True, async_strategy="mcore")
        finally:
            filesystem_async._results_queue = None
        write: Any = self._request.async_fn  # None if this rank has nothing to write
        buckets, transforms = ([], None) if write is None else (self._request.async_fn_args[1], write.args[0])
        own_bytes = self.other_bytes + sum(tensor.nbytes for *_, (_, tensors) in buckets for _, tensor in tensors)
        needed = sum(gather_from_ranks(own_bytes, int))
        run_on_rank0(lambda: check_room(parent, needed))
        storages = {tensor.untyped_storage()._cdata for tensor in live}
        copies = [_copy_to_host(bucket, storages) for bucket in buckets]
        self._thread = threading.Thread(target=self._write, args=(copies, transforms, results), daemon=True)
        self._thread.start()

    def _write(self, buckets: list[Any], transforms: Any, results: queue.Queue[Any]) -> None:
        try:
            written: dict[int, Any] = {}
            for number, bucket in enumerate(buckets):
                _, written[number] = FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, None, None, use_fsync=True)
                if isinstance(written[number], BaseException):
                    raise written[number]
            if buckets:
                results.put(written)
            own = [f"mcore/{bucket[1]}" for bucket in buckets]
            self.files = checksum_files(self._parent, [*own, *(name for other in self._others for name in other.write(self._parent))])
        except BaseException as error:
            self._error = f"rank {dist.get_rank()}: {_reason(error)}"

    def is_written(self) -> bool:
        """Return whether every rank has written its files or failed."""
        return not any(gather_from_ranks(self._thread.is_alive(), bool))

    def finish(self) -> None:
        """Wait for all ranks and finalize the folder. Raise RunError on every rank if any rank failed to write."""
        self._thread.join()
        raise_on_all_ranks(RunError(self._error) if self._error else None)
        try:
            for complete in self._request.finalize_fns:
                complete()
        except CheckpointException as error:  # a subclass of BaseException
            raise RunError(str(error)) from None


def _reason(error: BaseException) -> str:
    cause = find_os_error(error)
    return f"{type(error).__name__}: {error}" if cause is None else f"{cause.strerror or cause}"


def _copy_to_host(bucket: Any, live: set[int]) -> Any:
    """Return the bucket with its tensors in host memory. Tensors in one of the storages `live` are copied even if they are there
    already."""
    path, name, (texts, tensors) = bucket
    return path, name, (texts, [(item, tensor.to("cpu", copy=tensor.untyped_storage()._cdata in live)) for item, tensor in tensors])
