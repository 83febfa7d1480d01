"""Saves and loads a rank's part of a checkpoint with the run's own functions, except for the bytes of the files.

Megatron plans a save from the parts that all ranks name. A rehearsed rank is alone: the other ranks contribute each remaining cell of every
tensor's grid once, so that Megatron's and torch's own checks run on the whole grid. `check_places` checks where this rank's parts lie.
"""

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_rl.distributed import get_rank, is_rank0
from megatron_rl.mcore.checkpoint import async_save
from megatron_rl.mcore.checkpoint.async_save import AsyncSave
from megatron_rl.mcore.checkpoint.run_weights import find_stored
from megatron_rl.rehearsal.collectives import answer_for_others
from megatron_rl.rehearsal.device import FakeGpu
from parallel.layout import Coordinates, Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry
from parallel.shards import Region, Shard


class MisplacedPartError(RuntimeError):
    """A checkpoint would not hold a rank's weights at the place where other layouts expect them."""


@dataclass
class RehearsedFiles:
    """The files of a checkpoint without the bytes of tensors."""

    gpu: FakeGpu
    geometry: ModelGeometry
    layout: Layout
    texts: dict[str, bytes] = field(default_factory=dict)
    """Serialized objects other than tensors, by name."""
    nbytes: int = 0
    _plan: SavePlan = field(default_factory=lambda: SavePlan([]))
    _results: list[WriteResult] = field(default_factory=list)
    _rest: list[WriteItem] = field(default_factory=list)
    """Items that other ranks write."""

    @contextmanager
    def replace_disk(self) -> Iterator[None]:
        """Context manager in which checkpoints are saved to and loaded from this object."""
        files = self

        def write(self: AsyncSave, buckets: list[Any], _: Any, results: Any) -> None:
            self.files = files._write(buckets, results)
            files.nbytes += self.other_bytes

        def read(self: FileSystemReader, plan: LoadPlan, planner: Any) -> Future:
            return files._read(plan, planner)

        with (
            answer_for_others(self._answer),
            mock.patch.object(AsyncSave, "_write", write),
            mock.patch.object(async_save, "check_room"),  # this machine's disk is not the job's
            mock.patch.object(FileSystemReader, "read_data", read),
        ):
            yield

    def complete_as_rank0(self, folder: Path) -> None:
        """Write the files that rank 0 adds to a checkpoint into `folder`, unless this rank is rank 0."""
        if not is_rank0():
            _, metadata = MCoreSavePlanner(flatten_state_dict=False).create_global_plan([self._plan, SavePlan(self._rest)])
            FileSystemWriter(folder).finish(metadata, [self._results, self._write_rest()])
            torch.save({}, folder / "common.pt")
            save_config(CheckpointingConfig("torch_dist", 1), str(folder))

    def _answer(self, said: Any) -> tuple[Any, Any] | None:
        """Return the objects of other ranks for this rank's object; see `answer_for_others`."""
        if isinstance(said, SavePlan):
            self._plan = said
            return SavePlan(self._rest), SavePlan([])
        if not isinstance(said, list) or not said:
            return None
        if isinstance(said[0], ShardedTensor | ShardedObject):
            check_places(said, self.geometry, self.layout, get_rank())
            rest = list(_iter_rest(said))
            self._rest = [_plan_part(part) for part in rest]
            for part in said:
                if isinstance(part, ShardedObject) and not is_main_replica(part.replica_id):
                    torch.save([part.data], text := io.BytesIO())
                    self.texts[part.unique_key] = text.getvalue()  # the replica that writes it has the same
            return rest, []
        if isinstance(said[0], WriteResult):
            self._results = said
            return self._write_rest(), []
        return None

    def _write(self, buckets: list[Any], results: Any) -> dict[str, dict[str, Any]]:
        """Do the work of Megatron's writing function without the bytes of tensors. Runs in a thread, without torch operators."""
        written: dict[int, list[WriteResult]] = {}
        files: dict[str, dict[str, Any]] = {}
        for number, (_, name, (texts, tensors)) in enumerate(buckets):
            end, written[number] = 0, []
            for item, text in texts:
                self.texts[item.index.fqn] = text.getvalue()
            for item, data in (*texts, *tensors):
                size = data.nbytes if isinstance(data, torch.Tensor) else len(data.getbuffer())
                written[number].append(WriteResult(item.index, size, _StorageInfo(name, end, size)))
                end += size
            files[str(Path("mcore", name))] = {"bytes": end, "xxh3_128": ""}
            self.nbytes += end
        if buckets:
            results.put(written)
        return files

    def _write_rest(self) -> list[WriteResult]:
        return [WriteResult(item.index, 0, _StorageInfo("__other.distcp", 0, 0)) for item in self._rest]

    def _read(self, plan: LoadPlan, planner: Any) -> Future:
        """Do the work of torch's reader: load a stored part to the host, and copy the requested region."""
        stored = planner.metadata.state_dict_metadata
        tensors = {request.storage_index.fqn for request in plan.items if request.type != LoadItemType.BYTE_IO}
        sizes = {fqn: {chunk.offsets: chunk.sizes for chunk in stored[fqn].chunks} for fqn in tensors}
        for request in plan.items:
            index = request.storage_index
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, io.BytesIO(self.texts[index.fqn]))
                continue
            whole = self.gpu.make_host(list(sizes[index.fqn][index.offset]), stored[index.fqn].properties.dtype)
            part, target = narrow_tensor_by_index(whole, request.storage_offsets, request.lengths), planner.resolve_tensor(request).detach()
            if target.size() != part.size():
                raise MisplacedPartError(f"{index.fqn}: {list(part.size())} are read into {list(target.size())}")
            target.copy_(part) if isinstance(target, FakeTensor) else target.fill_(1)
            planner.commit_tensor(request, target)
        done: Future = Future()
        done.set_result(None)
        return done


def _iter_rest(own: Iterable[Any]) -> Iterator[Any]:
    """Yield the parts of every tensor's grid that this rank does not write."""
    by_key: dict[str, list[Any]] = defaultdict(list)
    for part in own:
        by_key[part.key].append(part)
    for parts in by_key.values():
        first, cells = parts[0], [part for part in parts if is_main_replica(part.replica_id)]
        if isinstance(first, ShardedObject):
            written, size = {part.global_offset for part in cells}, (1,) * len(first.global_shape)
            grid = tuple(first.global_shape)
        else:
            written, size = {part.local_chunk_offset_in_global() for part in cells}, (*(1,) * first.prepend_axis_num, *first.local_shape)
            grid = tuple(first.axis_fragmentations or ())
        for cell in product(*map(range, grid)):
            if cell not in written:
                yield replace(first, global_offset=tuple(i * n for i, n in zip(cell, size, strict=True)), replica_id=0)


def _plan_part(part: ShardedTensor | ShardedObject) -> WriteItem:
    if isinstance(part, ShardedObject):
        return WriteItem(MetadataIndex(part.unique_key), WriteItemType.BYTE_IO)
    offset, size = torch.Size(part.global_offset), torch.Size((*(1,) * part.prepend_axis_num, *part.local_shape))
    data = TensorWriteData(ChunkStorageMetadata(offset, size), TensorProperties(part.dtype), torch.Size(part.global_shape))
    return WriteItem(MetadataIndex(part.key, offset), WriteItemType.SHARD, tensor_data=data)


def check_places(parts: Iterable[Any], geometry: ModelGeometry, layout: Layout, rank: int) -> None:
    """Raise MisplacedPartError if a part of a weight, master or moment is not at its place in the whole tensor, or if a weight that no
    replica has would not be saved."""
    by_place: dict[tuple[str, str, tuple[int, ...]], list[ShardedTensor]] = defaultdict(list)
    for part in parts:
        if isinstance(part, ShardedTensor):
            kind, key = _split_kind(part.key)
            by_place[kind, key, tuple(part.global_offset[: part.prepend_axis_num])].append(part)
    kinds, keys = {kind for kind, *_ in by_place}, {key for _, key, _ in by_place}
    whole = {shard.name: shard for shard in build_megatron_shards(geometry, Layout(), Coordinates())}
    for shard in build_megatron_shards(geometry, layout, layout.coordinates(rank)):
        if shard.name not in whole:
            continue  # the last stage's copy of a tied embedding
        key, index = find_stored(shard.name, keys)
        found = [placed for kind in kinds if (placed := by_place.get((kind, key, index)))]
        if not found and layout.dp * layout.cp == 1:
            raise MisplacedPartError(f"no part of {shard.name}, which rank {rank} alone has, would be saved")
        for each in found:
            _check_place(each, shard, whole[shard.name])


def _split_kind(key: str) -> tuple[str, str]:
    """Return ("optimizer.exp_avg", a weight's key), or ("", the key)."""
    if not key.startswith("optimizer."):
        return "", key
    optimizer, kind, rest = key.split(".", 2)
    return f"{optimizer}.{kind}", rest


def _check_place(parts: list[ShardedTensor], shard: Shard, whole: Shard) -> None:
    """Check the parts of a shard, which are consecutive rows."""
    row = 0
    for part in parts:
        rows, cols = _as_matrix(part.local_shape, 0, 1)
        first_row, first_col = _as_matrix(part.global_offset, part.prepend_axis_num, 0)
        total = _as_matrix(part.global_shape, part.prepend_axis_num, 1)
        if total[1] != whole.cols or (total[0] != whole.rows and not part.allow_shape_mismatch) or cols != shard.cols:
            raise MisplacedPartError(
                f"{part.key}: {list(total)} with a part of {[rows, cols]}; the whole tensor is {[whole.rows, whole.cols]}"
            )
        for region in shard.regions:
            low, high = max(row, region.shard_row), min(row + rows, region.shard_row + region.tensor_rect.rows)
            if low < high:
                at = _find_in(whole, region)
                expected = at[0] + low - region.shard_row, at[1] - region.shard_col
                if (first_row + low - row, first_col) != expected:
                    raise MisplacedPartError(
                        f"{part.key}: {region.tensor.name} would be saved at row {first_row + low - row}, column {first_col}; "
                        f"it belongs at row {expected[0]}, column {expected[1]}"
                    )
        row += rows
    if row != shard.rows:
        raise MisplacedPartError(f"{parts[0].key}: {row} rows would be saved of the {shard.rows} that the rank has")


def _as_matrix(sizes: Any, prepended: int, pad: int) -> tuple[int, int]:
    """Return rows and columns of a shape or an offset. Vectors are padded with `pad`."""
    own = tuple(sizes[prepended:])
    return own if len(own) == 2 else (own[0], pad)


def _find_in(whole: Shard, region: Region) -> tuple[int, int]:
    """Return the row and column of the whole parameter at which a region begins."""
    tensor, (row, col, *_), *_ = region
    for each in whole.regions:
        rect = each.tensor_rect
        if each.tensor.name == tensor.name and rect.row <= row < rect.row + rect.rows and rect.col <= col < rect.col + rect.cols:
            return each.shard_row + row - rect.row, each.shard_col + col - rect.col
    raise MisplacedPartError(f"{whole.name} has no part of {tensor.name} at row {row}, column {col}")
