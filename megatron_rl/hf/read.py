"""Read the weights of a Hugging Face checkpoint: check their names against its config.json, then read rectangle by rectangle.

An FP8 checkpoint, as DeepSeek and Qwen publish them and as `export --precision fp8` writes them, says so in config.json's
`quantization_config`. Its linear weights `X` are float8_e4m3fn [N, K] beside `X_scale_inv` [ceil(N/128), ceil(K/128)], float32 or (Qwen)
bfloat16, which float32 holds exactly; value = byte's value * scale of its 128x128 block. Which weights these are is
`precision.contract.QUANTIZED_ROLES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import UserError
from megatron_rl.precision.contract import E4M3_MAX, QUANTIZED_ROLES
from megatron_rl.precision.fp8 import Fp8Weight
from parallel.formats import BLOCK, count_blocks
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect, scale_name
from parallel.shards import HFTensor, Region

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_HIGH, _SCALES = ("BF16", "F16", "F32"), ("F32", "BF16")
_E4M3 = "F8_E4M3"
_FP8_SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def is_fp8_checkpoint(hf_config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes 128x128 FP8 blocks. Raise UserError for any other quantisation."""
    quantization = hf_config.get("quantization_config")
    if quantization is None:
        return False
    settings = {"fmt": "e4m3", **quantization} if isinstance(quantization, dict) else {}
    for name, supported in _FP8_SETTINGS.items():
        if settings.get(name) != supported:
            rule, fix = f"is not read, only {supported} is", "give a BF16 checkpoint, or one with FP8 weights in blocks of 128x128"
            raise UserError(f"config.json quantization_config.{name}", str(settings.get(name)), rule, fix)
    return True


@dataclass(frozen=True)
class _Header:
    """A file's description of a tensor it holds."""

    file: Path
    dtype: str
    shape: list[int]


class HFCheckpoint:
    """The tensors of a checkpoint folder, one safetensors file or several with an index; each file is opened once.

    Raises UserError, naming `field`, for files that are missing, damaged or not as the index says. Values are read in the file's dtype.
    Call `check` before reading: it ensures that every tensor is there.
    """

    def __init__(self, folder: Path, hf_config: Mapping[str, Any], field: str = "model.path") -> None:
        self.folder, self.field = folder, field
        self.fp8 = is_fp8_checkpoint(hf_config)
        """Weights of `QUANTIZED_ROLES` are blocks with scales."""
        self._open: dict[Path, Any] = {}
        self._headers: dict[str, _Header] = {}
        index = _read_index(folder, field)
        for file in sorted(set(index.values())) or [SINGLE]:
            self._read_headers(folder / file)
        for name, file in index.items():
            if name not in self._headers or self._headers[name].file != folder / file:
                raise self._error(f"{INDEX} says that {file} holds {name}, which it does not", "the download is incomplete or mixed up")

    def _read_headers(self, path: Path) -> None:
        try:
            self._open[path] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            fix = "the file is missing, truncated or no safetensors file"
            raise UserError(self.field, str(path), f"cannot be read ({error})", fix) from None
        for name in self._open[path].keys():  # noqa: SIM118 - not a dict
            view = self._open[path].get_slice(name)
            if name in self._headers:
                raise self._error(f"tensor {name} is in {self._headers[name].file.name} and in {path.name}", "remove one of them")
            self._headers[name] = _Header(path, view.get_dtype(), view.get_shape())

    def check(self, model: ModelGeometry) -> None:
        """Compare names, shapes and dtypes, from the files' headers alone, with what config.json says.

        Raises UserError naming the first tensor that is missing, has another shape or dtype, or belongs to no such model. Ignores
        `lm_head.weight` beside tied embeddings, rotary frequencies, and layers for multi-token prediction.
        """
        expected = set()
        for tensor in model.tensors().values():
            fp8 = self.has_fp8_blocks(tensor)
            expected.add(tensor.name)
            self._check_tensor(tensor.name, [tensor.rows] if tensor.vector else [tensor.rows, tensor.cols], (_E4M3,) if fp8 else _HIGH)
            if fp8:
                expected.add(scale_name(tensor.name))
                self._check_tensor(scale_name(tensor.name), [count_blocks(tensor.rows), count_blocks(tensor.cols)], _SCALES)
        for name in sorted(self._headers.keys() - expected):
            if not self._is_ignored(name, model):
                rule = f"tensor {name} belongs to no {model.family} model of this config.json"
                raise self._error(rule, "remove the tensor, or correct config.json")

    def _check_tensor(self, name: str, shape: list[int], dtypes: tuple[str, ...]) -> None:
        header = self._headers.get(name)
        if header is None:
            raise self._error(f"tensor {name} is missing", "the checkpoint is incomplete, or config.json is another model's")
        if header.shape != shape:
            raise self._error(f"tensor {name} has shape {header.shape}, config.json says {shape}", "correct config.json")
        if header.dtype not in dtypes:
            raise self._error(f"tensor {name} is {header.dtype}, must be {' or '.join(dtypes)}", self._dtype_fix(header.dtype, dtypes))

    def _dtype_fix(self, dtype: str, wanted: tuple[str, ...]) -> str:
        if dtype == _E4M3 and not self.fp8:
            return "config.json has no quantization_config: restore it"
        if wanted == (_E4M3,) or (dtype == _E4M3 and wanted == _HIGH):
            what = "all weights of attention, MLP and experts, nothing else"
            return f"FP8 are {what}: give a checkpoint whose modules_to_not_convert say so, or a BF16 one"
        return "convert it"

    def _is_ignored(self, name: str, model: ModelGeometry) -> bool:
        if name.endswith("rotary_emb.inv_freq") or (model.tied and name == "lm_head.weight"):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return layer is not None and model.layers <= int(layer[1]) < model.layers + model.unused_layers

    def check_scales(self, tensors: Iterable[HFTensor], scale_format: str | None) -> None:
        """Read the scales of those `tensors` that are FP8, 1/16384 of their elements.

        Raises UserError by name where a scale is not positive or makes 448 overflow, or, with `scale_format` "pow2", is no power of two.
        (Powers of two pass as "fp32" scales; the activations' format is the run's own.)
        """
        for name in (scale_name(tensor.name) for tensor in tensors if self.has_fp8_blocks(tensor)):
            scale = self._slice(name)[:].float()
            if not (torch.isfinite(scale * E4M3_MAX) & (scale > 0)).all():
                raise self._error(f"tensor {name} holds a scale that is inf, NaN or not positive", "the checkpoint is damaged")
            if scale_format == "pow2" and not (torch.frexp(scale).mantissa == 0.5).all():
                to_bf16 = f"megatron-rl export --checkpoint {self.folder} --output DIR --precision bf16"
                fix = f'set precision.scale_format = "fp32", or dequantise the checkpoint: {to_bf16}'
                raise self._error(f'tensor {name} holds scales that are no powers of two, precision.scale_format is "pow2"', fix)

    def read_values(self, region: Region) -> torch.Tensor:
        """Return the region's rectangle of its tensor: [rows, cols], or [rows] for a vector, in the file's dtype; FP8 as float32.

        Any rectangle, whole blocks or not. Raises UserError where a value is inf or NaN.
        """
        tensor, (row, col, rows, cols), *_ = region
        view = self._slice(tensor.name)
        value = view[row : row + rows] if tensor.vector else view[row : row + rows, col : col + cols]
        if self.has_fp8_blocks(tensor):
            scale = self._slice(scale_name(tensor.name))[:].float()
            row_blocks, col_blocks = (torch.arange(start, start + length) // BLOCK for start, length in ((row, rows), (col, cols)))
            value = value.float() * scale[row_blocks][:, col_blocks]
        self._refuse_non_finite(tensor.name, torch.isfinite(value))
        return value

    def read_blocks(self, region: Region) -> Fp8Weight:
        """Return the bytes and scales of a region of whole blocks, never requantised. Raise UserError where a byte is NaN."""
        row, col, rows, cols = region.tensor_rect
        data = self._slice(region.tensor.name)[row : row + rows, col : col + cols]
        self._refuse_non_finite(region.tensor.name, data.view(torch.uint8) & 0x7F != 0x7F)  # E4M3 has no inf
        row, col, rows, cols = get_scale_rect(region.tensor_rect)
        return Fp8Weight(data, self._slice(scale_name(region.tensor.name))[row : row + rows, col : col + cols].float())

    def has_fp8_blocks(self, tensor: HFTensor) -> bool:
        """Return whether the checkpoint stores `tensor` in FP8."""
        return self.fp8 and tensor.role in QUANTIZED_ROLES

    def _slice(self, name: str) -> Any:
        return self._open[self._headers[name].file].get_slice(name)

    def _refuse_non_finite(self, name: str, finite: torch.Tensor) -> None:
        if not finite.all():
            raise self._error(f"tensor {name} holds inf or NaN", "the checkpoint is damaged")

    def _error(self, rule: str, fix: str) -> UserError:
        return UserError(self.field, str(self.folder), rule, fix)


def _read_index(folder: Path, field: str) -> dict[str, str]:
    """Return tensor -> file name; empty where the folder holds a single file."""
    path = folder / INDEX
    if not path.is_file():
        if not (folder / SINGLE).is_file():
            raise UserError(field, str(folder), f"holds neither {SINGLE} nor its index", "give a folder with safetensors weights")
        return {}
    try:
        index = json.loads(path.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(field, str(path), f"is no index of safetensors files ({error!r})", "the file is damaged") from None
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise UserError(field, str(path), "is no index of safetensors files", "weight_map must map tensors to file names")
    for file in sorted(set(index.values())):
        if not (folder / file).is_file():
            raise UserError(field, str(path), f"names {file}, which is missing", "the download is incomplete")
    return index
