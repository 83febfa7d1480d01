"""A checkpoint of which the headers alone are read: names, shapes and dtypes, no weights. `hf.read` reads it as any other.

Where a folder holds config.json alone, as `configs/models` do, the headers are those that the model's family says.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.hf import read
from megatron_rl.hf.files import INDEX, SINGLE, read_config
from megatron_rl.rehearsal.device import FakeGpu
from parallel.formats import BF16
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
Header = tuple[list[int], str]
"""(shape, dtype as safetensors writes it)"""


@contextmanager
def read_headers_alone(gpu: FakeGpu, folder: Path, scratch: Path) -> Iterator[Path]:
    """Within the context open files of weights for their headers; yield the folder to read, `scratch` where `folder` has none."""
    invented: dict[str, Header] = {}
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        invented = invent_headers(read_config(folder))
        shutil.copy(folder / "config.json", scratch)
        (scratch / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(invented, SINGLE)}))
        (scratch / SINGLE).touch()
        folder = scratch
    reader: Any = read
    plain, reader.safe_open = read.safe_open, lambda path, framework: _Headers(gpu, invented or _read_headers(path))
    try:
        yield folder
    finally:
        reader.safe_open = plain


def invent_headers(hf_config: dict[str, Any]) -> dict[str, Header]:
    """Return the header of every tensor that a checkpoint of this config.json has."""
    headers: dict[str, Header] = {}
    quantized = read.find_checkpoint_format(hf_config)
    model = ModelGeometry.from_hf_config(hf_config)
    for tensor in (*model.tensors().values(), *list_mtp_tensors(model).values()):
        format = quantized if quantized is not None and tensor.role in read.QUANTIZED_ROLES else None
        dtype = (format or BF16).safetensors_dtype
        headers[tensor.name] = [tensor.rows] if tensor.vector else [tensor.rows, tensor.cols], dtype
        if format:
            headers[format.scale_name(tensor.name)] = list(format.scale_grid(tensor.rows, tensor.cols)), format.scale.safetensors_dtype
    return headers


def _read_headers(path: Any) -> dict[str, Header]:
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return {name: (view.get_shape(), view.get_dtype()) for name, view in slices.items()}


class _Headers:
    """What `safe_open` returns."""

    def __init__(self, gpu: FakeGpu, headers: dict[str, Header]) -> None:
        self._gpu, self._headers = gpu, headers

    def keys(self) -> list[str]:
        return list(self._headers)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._gpu, *self._headers[name])


class _Slice:
    """What `get_slice` returns; indexed, it gives a host tensor without data."""

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
