"""Reads weights of a Hugging Face checkpoint: checks their names against config.json, then reads rectangles.

The `quantization_config` of a quantized checkpoint, as published by DeepSeek and Qwen or written by `export`, selects a row of
`parallel.formats.FORMATS`. An FP8 weight `X` is float8_e4m3fn [N, K], and `X_scale_inv` [ceil(N/128), ceil(K/128)] is float32 or bfloat16;
value = byte's value * scale of its 128x128 block. `precision.contract.QUANTIZED_ROLES` lists the quantized weights.
"""

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_rl.errors import UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format, find_stack, list_mxfp4
from megatron_rl.hf.files import INDEX, SINGLE, list_large_files, read_index
from megatron_rl.hf.stacks import ExpertSlice, Mxfp4Slice, PartSlice
from megatron_rl.precision.contract import QUANTIZED_ROLES
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.quantizers import QUANTIZERS, dequantize
from parallel.formats import BLOCK, FORMATS, TensorFormat
from parallel.model_geometry import VALUE_HEAD, ModelGeometry
from parallel.mtp_layers import list_mtp_copies, list_mtp_tensors
from parallel.reshard import get_scale_rect
from parallel.shards import HFTensor, Rect, Region

_HIGH = ("BF16", "F16", "F32")
_HEAD = "lm_head.weight"
_MTP_IS_KEPT = "the layers for multi-token prediction are not trained; checkpoints and exports keep them"
_INDEXER_IS_KEPT = (
    "up to index_topk tokens, sparse attention selects every token, so its indexers are neither trained nor synced to engines; checkpoints "
    "and exports keep them"
)
_VISION_IS_KEPT = "the vision tower is not trained, because samples are text; checkpoints and exports keep it"
_OTHER_PARTS = {"adapter_config.json": "transformers", "decision_config.json": "SGLang", "joint_head_config.json": "SGLang"}
"""Files that add adapters or a head to the weights beside them, and who reads them."""
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
"""Name of an expert's matrix. transformers 5 stores all experts of a layer in two tensors, without `.weight`."""
_STRIP = 1 << 22  # elements to read or check at a time


def _explain_unread(name: str, model: ModelGeometry) -> str:
    """Return why a stored tensor outside the MTP layers is not read, or "" if it is read or unknown."""
    if name.endswith("rotary_emb.inv_freq"):
        return "config.json determines the rotary frequencies"
    if name == _HEAD and model.value_head:
        return "the model has a value head instead"
    if name == _HEAD and model.tied:
        return "it equals the embedding, to which tie_word_embeddings ties it"
    return ""


def _shorten(names: Sequence[str]) -> str:
    """Return the names of tensors. Those that differ only in numbers are represented by the first."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    return ", ".join(each[0] + f" and {len(each) - 1} of other numbers" * (len(each) > 1) for each in alike.values())


class HFCheckpoint:
    """The tensors of a checkpoint folder: one safetensors file, or several with an index. Files are opened lazily.

    Raises UserError, naming `field`, if files are missing, damaged or differ from the index. Values are read in the file's dtype. One
    process must call `check` before anything is read.
    """

    def __init__(self, folder: Path, hf_config: Mapping[str, Any], field: str = "model.path") -> None:
        self.folder, self.field = folder, field
        self.format = find_checkpoint_format(hf_config)
        """Format of the weights listed in `QUANTIZED_ROLES`, or None if the checkpoint is not quantized."""
        self._open: dict[Path, Any] = {}
        index, single = read_index(folder, field), folder / SINGLE
        if not index and not os.path.isfile(single):
            raise UserError(field, str(folder), f"holds neither {SINGLE} nor its index", "name a folder with safetensors weights")
        if index and os.path.isfile(single) and SINGLE not in index.values():  # transformers reads the file, SGLang follows the index
            raise self._error(f"holds both {SINGLE} and an index of other files", "remove one of them")
        for name, reader in _OTHER_PARTS.items():
            if os.path.isfile(folder / name):
                raise self._error(f"holds {name}: {reader} would compute with more than these weights", "move the file, or merge its part")
        self._file_of = {name: folder / file for name, file in index.items()} or dict.fromkeys(self._open_file(single).keys(), single)

    def _open_file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError, ValueError) as error:  # ValueError: a name that is not UTF-8
                fix = "the file is missing, truncated, unreadable or not a safetensors file"
                raise UserError(self.field, str(path), f"cannot be read ({error})", fix) from None
        return self._open[path]

    def check(self, model: ModelGeometry) -> None:
        """Read the headers of all files, and compare names, shapes and dtypes with config.json.

        Raises UserError for the first file that is missing or damaged, or the first tensor that is missing, unexpected or of the wrong
        shape or dtype. `describe_unread` lists the tensors that are not read; one that should equal another tensor is compared with it. A
        missing value head is read as zeros. MTP layers may be missing as a whole, may lack copies of other weights, and may be unquantized
        in a quantized checkpoint.
        """
        found = self._check_files()
        self._check_stacks(model)
        expected = {name for name in found if model.is_vision_tensor(name)}
        for tensor in model.tensors().values():
            expected |= {tensor.name} if self._starts_at_0(tensor) else self._check_weight(tensor, self.find_format(tensor))
        expected |= self._check_mtp_layers(model)
        expected.update(*(self._check_kept(tensor) for tensor in model.list_kept().values()))
        for name in sorted(found.keys() - expected):
            if not _explain_unread(name, model):
                rule = f"tensor {name} does not belong to the {model.family} model that config.json describes"
                raise self._error(rule, "remove the tensor, or correct config.json")
        self.check_copies(model)

    def _check_stacks(self, model: ModelGeometry) -> None:
        """Raise UserError if a stack of experts is not [E, ...] for the model's number of experts E, or lacks a part."""
        count = model.experts.count if model.experts else 0
        for stored in sorted({self._list_stored(tensor.name) for tensor in model.tensors().values()}):
            if stored[0] not in self._file_of or (len(stored) == 1 and stored[0] in model.tensors()):
                continue
            for name in stored:
                if name not in self._file_of:
                    raise self._error(f"tensor {name} is missing", "the checkpoint is incomplete")
                view = self._open_file(self._file_of[name]).get_slice(name)
                shape = view.get_shape()
                if len(shape) < 2 or shape[0] != count:
                    raise self._error(f"tensor {name} has shape {shape}, config.json says {count} experts", "correct config.json")
                if len(stored) > 1 and view.get_dtype() != "U8":
                    raise self._error(f"tensor {name} is {view.get_dtype()}, must be U8 in MXFP4", "the checkpoint is damaged")
            blocks, *scales = (self._open_file(self._file_of[name]).get_slice(name).get_shape() for name in stored)
            if scales and (scales[0] != blocks[:-1] or blocks[3:] != [16]):
                raise self._error(f"tensor {stored[1]} has shape {scales[0]}, but {stored[0]} {blocks}", "the checkpoint is damaged")

    def check_copies(self, model: ModelGeometry) -> None:
        """Raise UserError if a stored copy of the embedding or output layer, which is not read, differs from the original."""
        originals = {tensor.role: tensor for tensor in model.tensors().values() if tensor.role in ("embedding", "lm_head")}
        copies = {_HEAD: "embedding"} if model.tied and not model.value_head else {}
        for number in range(model.mtp_layers if model.trains_mtp else 0):
            copies |= {name: tensor.role for name, tensor in list_mtp_copies(model, number).items()}
        for name, role in copies.items():
            original = originals.get(role, originals["embedding"])  # of a tied model
            if name not in self._file_of or name == original.name:
                continue
            self._check_tensor(name, [original.rows, original.cols], _HIGH)
            step, views = max(_STRIP // original.cols, 1), (self._slice(name), self._slice(original.name))
            for row in range(0, original.rows, step):
                copy, value = (view[row : row + step] for view in views)
                if not torch.equal(copy.float(), value.float()):
                    fix = "set tie_word_embeddings to false in config.json, or remove the tensor" if name == _HEAD else "remove the tensor"
                    raise self._error(f"tensor {name} differs from {original.name}, of which config.json makes it a copy", fix)

    def describe_unread(self, model: ModelGeometry) -> list[str]:
        """Return one line for each reason why tensors or files are not read. Reads only headers."""
        unread: dict[str, list[str]] = {}
        for name in sorted(self._check_files()):
            kept = _MTP_IS_KEPT * (model.is_mtp_tensor(name) and not model.trains_mtp)
            kept = kept or _VISION_IS_KEPT * model.is_vision_tensor(name) or _INDEXER_IS_KEPT * model.is_kept_tensor(name)
            if reason := kept or _explain_unread(name, model):
                unread.setdefault(reason, []).append(name)
        lines = [f"not read from {self.folder}: {_shorten(names)}: {reason}" for reason, names in unread.items()]
        if files := ", ".join(file.name for file in self.list_unread_files()):
            lines.append(f"not read from {self.folder}: {files}: not {SINGLE}, nor named by its index")
        if large := ", ".join(str(file.relative_to(self.folder)) for file in list_large_files(self.folder, self.field)):
            lines.append(f"not copied from {self.folder}: {large}: no tokenizer has files of this size")
        return lines

    def list_unread_files(self) -> list[Path]:
        """Return the safetensors files beside those of the checkpoint."""
        return sorted(set(self.folder.glob("*.safetensors")) - set(self._file_of.values()))

    def _check_mtp_layers(self, model: ModelGeometry) -> set[str]:
        if not any(model.is_mtp_tensor(name) for name in self._file_of):
            return set()
        tensors = list_mtp_tensors(model)
        for number in range(model.mtp_layers):
            for name in list_mtp_copies(model, number).keys() - self._file_of.keys():
                del tensors[name]
        return set().union(*(self._check_kept(tensor) for tensor in tensors.values()))

    def _check_kept(self, tensor: HFTensor) -> set[str]:
        """Check a tensor that may be unquantized in a quantized checkpoint. Return its name and that of its scales."""
        format = self.find_format(tensor)
        return self._check_weight(tensor, format if format and format.scale_name(tensor.name) in self._file_of else None)

    def _check_weight(self, tensor: HFTensor, format: TensorFormat | None) -> set[str]:
        """Check a tensor and its scales. Return their names."""
        dtypes = (format.safetensors_dtype,) if format else _HIGH
        self._check_tensor(tensor.name, list(tensor.shape), dtypes)
        if format is None:
            return set(self._list_stored(tensor.name))
        name, scale_dtype = format.scale_name(tensor.name), format.scale.safetensors_dtype
        scale_dtypes = (scale_dtype, "BF16") if scale_dtype == "F32" else (scale_dtype,)
        self._check_tensor(name, list(format.scale_grid(tensor.rows, tensor.cols)), scale_dtypes)
        return {self._find_stored(tensor.name), name}

    def _check_files(self) -> dict[str, Path]:
        """Return {tensor: file} from the files' headers. Raise UserError if it differs from the index."""
        found: dict[str, Path] = {}
        for path in sorted(set(self._file_of.values())):
            if not os.path.isfile(path):
                raise UserError(self.field, str(self.folder / INDEX), f"names {path.name}, which is missing", "the download is incomplete")
            for name in self._open_file(path).keys():  # noqa: SIM118 - not a dict
                if name in found:
                    raise self._error(f"tensor {name} is in {found[name].name} and in {path.name}", "remove one of them")
                found[name] = path
        for name, path in self._file_of.items():
            if found.get(name) != path:
                rule = f"{INDEX} says that {path.name} holds {name}, but it does not"
                raise self._error(rule, "the download is incomplete or mixed up")
        return found

    def _check_tensor(self, name: str, shape: list[int], dtypes: tuple[str, ...]) -> None:
        if self._find_stored(name) not in self._file_of:
            raise self._error(f"tensor {name} is missing", "the checkpoint is incomplete, or config.json is another model's")
        view = self._slice(name)
        if view.get_shape() != shape:
            raise self._error(f"tensor {name} has shape {view.get_shape()}, config.json says {shape}", "correct config.json")
        if (dtype := view.get_dtype()) not in dtypes:
            raise self._error(f"tensor {name} is {dtype}, must be {' or '.join(dtypes)}", self._dtype_fix(dtype, dtypes))

    def _dtype_fix(self, dtype: str, wanted: tuple[str, ...]) -> str:
        quantized = {format.safetensors_dtype for format in FORMATS.values() if format.quantized}
        if self.format is None:
            return "config.json has no quantization_config: restore it" if dtype in quantized else "convert it"
        if quantized & set(wanted) or (dtype in quantized and wanted == _HIGH):
            what = "all weights of attention, MLP and experts, nothing else"
            return f"{self.format.name.upper()} must be {what}: use a checkpoint whose modules_to_not_convert say so, or a BF16 one"
        return "convert it"

    def check_scales(self, tensors: Iterable[HFTensor], wanted: TensorFormat | None) -> None:
        """Read the scales of the quantized tensors among `tensors`; in FP8 these are 1/16384 of the elements.

        Raises UserError if a scale is not positive, makes the largest value overflow, or is not a power of two although the trainer's
        format `wanted` has "pow2" scales. Powers of two are accepted as "fp32" scales. Weights in another format than `wanted` are
        quantized again, so their scales may be any.
        """
        for tensor in tensors:
            if (format := self.find_format(tensor)) is None:
                continue
            name, dtype = format.scale_name(tensor.name), getattr(torch, format.dtype)
            scale = QUANTIZERS[format.name].read_scales(self._slice(name)[:])
            largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
            if not (torch.isfinite(scale * largest) & (scale > 0)).all():
                raise self._error(f"tensor {name} holds a scale that is inf, NaN or not positive", "the checkpoint is damaged")
            adopted = wanted is not None and (wanted.name, wanted.scale_format) == (format.name, "pow2")
            if adopted and not (torch.frexp(scale).mantissa == 0.5).all():
                to_bf16 = f"megatron-rl export --checkpoint {shlex.quote(str(self.folder))} --output DIR --precision bf16"
                fix = f'set precision.scale_format = "fp32", or dequantize the checkpoint: {to_bf16}'
                raise self._error(f'tensor {name} holds scales that are not powers of two, precision.scale_format is "pow2"', fix)

    def list_copied_tensors(self, model: ModelGeometry) -> dict[str, int]:
        """Return {name: bytes} of the stored tensors of MTP layers, indexers and the vision tower, including scales. Reads only headers."""
        kinds = (model.is_mtp_tensor, model.is_kept_tensor, model.is_vision_tensor)
        return {name: self._count_bytes(name) for name in sorted(self._file_of) if any(belongs(name) for belongs in kinds)}

    def _count_bytes(self, name: str) -> int:
        view = self._slice(name)
        bits = re.search(r"\d+", view.get_dtype())
        return math.prod(view.get_shape()) * (int(bits[0]) // 8 if bits else 1)

    def read_stored(self, name: str) -> torch.Tensor:
        return self._open_file(self._file_of[name]).get_tensor(name)

    def read_values(self, region: Region) -> torch.Tensor:
        """Return a region's rectangle of its tensor: [rows, cols], or [rows] for a vector, in the file's dtype, or float32 if quantized.
        The rectangle may cut blocks. Raises UserError if a value is inf or NaN."""
        tensor, (row, col, rows, cols), *_ = region
        if self._starts_at_0(tensor):
            return torch.zeros(rows, cols)
        format, view, whole = self.find_format(tensor), self._slice(tensor.name), (slice(None),) * (len(tensor.shape) - 2)
        if format is not None and format.block is not None:
            above, left = row % format.block[0], col % (format.block[1] or 1)  # part of the first blocks outside the rectangle
            blocks = Rect(row - above, col - left, above + rows, left + cols)
            value = dequantize(self._read_blocks(tensor, format, blocks), format)[above:, left:]
        else:
            value = view[row : row + rows] if tensor.vector else view[(slice(row, row + rows), *whole, slice(col, col + cols))]
            value = value.squeeze(1) if whole else value
        self._refuse_non_finite(tensor.name, value)
        return value

    def read_into(self, region: Region, into: torch.Tensor) -> None:
        """Copy a region's `read_values` into `into`, some rows of blocks at a time."""
        tensor, rect, *_ = region
        step, end = max(_STRIP // rect.cols // BLOCK, 1) * BLOCK, rect.row + rect.rows
        edges = [rect.row, *range(rect.row - rect.row % step + step, end, step), end]
        for first, last in pairwise(edges):
            part = Region(tensor, rect._replace(row=first, rows=last - first))
            into[first - rect.row : last - rect.row].copy_(self.read_values(part))

    def read_blocks(self, region: Region) -> QuantizedWeight:
        """Return the bytes and scales of a region of whole blocks. Raise UserError if a byte is NaN."""
        format = self.find_format(region.tensor)
        assert format is not None
        blocks = self._read_blocks(region.tensor, format, region.tensor_rect)
        for rows in blocks.data.split(max(_STRIP // blocks.data.shape[1], 1)):
            self._refuse_non_finite(region.tensor.name, rows.float())
        return blocks

    def _read_blocks(self, tensor: HFTensor, format: TensorFormat, rect: Rect) -> QuantizedWeight:
        parts = []
        for name, (row, col, rows, cols) in ((tensor.name, rect), (format.scale_name(tensor.name), get_scale_rect(rect, format))):
            parts.append(self._slice(name)[row : row + rows, col : col + cols])
        return QuantizedWeight(parts[0], parts[1].to(getattr(torch, format.scale_dtype)))

    def find_format(self, tensor: HFTensor) -> TensorFormat | None:
        """Return the format in which the checkpoint stores `tensor` quantized, or None."""
        return self.format if tensor.role in QUANTIZED_ROLES else None

    def _starts_at_0(self, tensor: HFTensor) -> bool:
        return tensor.name == VALUE_HEAD and tensor.name not in self._file_of

    def _find_stored(self, name: str) -> str:
        """Return the name of the stored tensor that holds a tensor: its own, or that of a stack of all experts."""
        if (part := find_stack(name)) is not None:
            return next((each for each in list_mxfp4(part[0]) if each in self._file_of), part[0])
        match = _EXPERT.fullmatch(name)
        if match is None or name in self._file_of:
            return name
        stack = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
        return stack if stack in self._file_of else name

    def _list_stored(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that hold a tensor: one, or the bytes and scales of a stack in MXFP4."""
        stored = self._find_stored(name)
        return list_mxfp4(stored.removesuffix("_blocks")) if stored.endswith("_blocks") else (stored,)

    def _slice(self, name: str) -> Any:
        stored = self._find_stored(name)
        view = self._open_file(self._file_of[stored]).get_slice(stored)
        if (part := find_stack(name)) is not None:
            others = [self._open_file(self._file_of[each]).get_slice(each) for each in self._list_stored(name)[1:]]
            return Mxfp4Slice(view, others[0], part[1]) if others else PartSlice(view, part[1])
        return view if stored == name else ExpertSlice(view, *_EXPERT.fullmatch(name).groups()[1:])  # type: ignore[union-attr]

    def _refuse_non_finite(self, name: str, values: torch.Tensor) -> None:
        if not torch.isfinite(values).all():
            raise self._error(f"tensor {name} holds inf or NaN", "the checkpoint is damaged")

    def _error(self, rule: str, fix: str) -> UserError:
        return UserError(self.field, str(self.folder), rule, fix)
