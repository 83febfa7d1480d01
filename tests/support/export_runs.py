"""Exports of a run's checkpoint in ranks, and what they read."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_rl.hf.files import read_config
from megatron_rl.mcore.checkpoint.run_weights import RunWeights
from megatron_rl.mcore.weights import export
from parallel.layout import Coordinates, Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry
from support.trainer import start

_FILE_BYTES = 1 << 17


def convert(run: Path, to: Path, full_at: str = "") -> tuple[int, int]:
    """Export in the run's precision, in small files: (bytes of weights read, those of the largest read). No file whose name begins with
    `full_at` can be written."""
    read, read_parameter, write = [], RunWeights._read, export.write_file

    def watch(self: RunWeights, *place: Any) -> torch.Tensor:
        tensor = read_parameter(self, *place)
        read.append(tensor.nbytes)
        return tensor

    def write_or_fail(path: Path, *rest: Any) -> dict[str, int]:
        if full_at and path.name.startswith(full_at):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *rest)

    start(Layout(dp=int(os.environ.get("WORLD_SIZE", "1"))))
    with mock.patch.object(RunWeights, "_read", watch), mock.patch.object(export, "write_file", write_or_fail):
        export.convert(run, to, {}, file_bytes=_FILE_BYTES)
    return sum(read), max(read)


def largest_parameter(run: Path) -> int:
    """Bytes of the largest parameter of a run, in FP32."""
    model = ModelGeometry.from_hf_config(read_config(run / "hf"))
    return max(4 * shard.rows * shard.cols for shard in build_megatron_shards(model, Layout(), Coordinates()))
