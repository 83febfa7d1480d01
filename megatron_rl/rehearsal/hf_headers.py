"""Reads only the headers of a Hugging Face checkpoint: names, shapes and dtypes, no weights. `hf.read` uses it like any checkpoint.

For a folder with config.json alone, such as those in `configs/models`, the headers are derived from the model's family.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open

from megatron_rl.hf import read
from megatron_rl.hf.checkpoint_format import find_checkpoint_format
from megatron_rl.hf.files import INDEX, SINGLE, read_config
from megatron_rl.rehearsal.device import FakeGpu
from parallel.formats import BF16
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
Header = tuple[list[int], str]
"""(shape, dtype as safetensors writes it)"""


@contextmanager
def read_headers_only(gpu: FakeGpu, folder: Path, scratch: Path) -> Iterator[Path]:
    """Context manager in which files of weights are opened for their headers. Yield the folder to read: `scratch` if `folder` has none."""
    derived: dict[str, Header] = {}
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        derived = derive_headers(read_config(folder))
        shutil.copy(folder / "config.json", scratch)
        (scratch / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(derived, SINGLE)}), encoding="utf-8")
        (scratch / SINGLE).touch()
        folder = scratch
    headers = mock.patch.object(read, "safe_open", lambda path, framework: _Headers(gpu, derived or _read_headers(path)))
    with headers, mock.patch.object(read.HFCheckpoint, "check_copies", return_value=None):  # there are no values to compare
        yield folder


def derive_headers(hf_config: dict[str, Any]) -> dict[str, Header]:
    """Return the header of every tensor of a checkpoint with this config.json."""
    headers: dict[str, Header] = {}
    quantized = find_checkpoint_format(hf_config)
    model = ModelGeometry.from_hf_config(hf_config)
    for tensor in (model.tensors() | list_mtp_tensors(model) | model.list_kept()).values():
        format = quantized if quantized is not None and tensor.role in read.QUANTIZED_ROLES else None
        dtype = (format or BF16).safetensors_dtype
        headers[tensor.name] = list(tensor.shape), dtype
        if format:
            headers[format.scale_name(tensor.name)] = list(format.scale_grid(tensor.rows, tensor.cols)), format.scale.safetensors_dtype
    return headers


def _read_headers(path: Any) -> dict[str, Header]:
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return {name: (view.get_shape(), view.get_dtype()) for name, view in slices.items()}


class _Headers(dict[str, Header]):
    """Stands in for the result of `safe_open`."""

    def __init__(self, gpu: FakeGpu, headers: dict[str, Header]) -> None:
        super().__init__(headers)
        self._gpu = gpu

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._gpu, *self[name])


class _Slice:
    """Stands in for the result of `get_slice`. Indexing returns a host tensor without data."""

    def __init__(self, gpu: FakeGpu, shape: list[int], dtype: str) -> None:
        self._gpu, self._shape, self._dtype = gpu, shape, dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        parts = key if isinstance(key, tuple) else (key,)
        cut = [len(range(size)[part]) for size, part in zip(self._shape, parts, strict=False)]
        return self._gpu.make_host([*cut, *self._shape[len(parts) :]], _DTYPES[self._dtype])
