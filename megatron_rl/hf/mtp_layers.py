"""What a run does not train: layers for multi-token prediction (MTP), indexers of sparse attention (`parallel.attention.latent`), and the
vision tower of a wrapper (`parallel.wrappers`). Every checkpoint and every export of a run keeps a copy.

A copy in a run's checkpoint is byte-identical. In an export, weights of MTP decoder layers and of indexers are converted if the other
layers are, because config.json has one `quantization_config` for all layers; other tensors are byte-identical.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.hf.write import FILE_BYTES, cut_into_files, name_file, write_file, write_index
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import QUANTIZERS, store
from parallel.formats import TensorFormat
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_tensors
from parallel.shards import take_all
from parallel.wrappers import DECODER

MTP_FOLDER = "mtp"  # folder in a run's checkpoint for the safetensors files of MTP layers, with an index if there are several files


class MTPCopy:
    """Writes the copy of the MTP layers into a run's checkpoint. Rank `rank` of `world` writes a share of the files.

    Every rank constructs one; no communication is needed. Only headers and the tensors of this rank's files are read, one file after the
    other. Raises UserError if the checkpoint folder `source` cannot be read.
    """

    def __init__(self, source: Path, hf_config: Mapping[str, Any], rank: int, world: int, file_bytes: int = FILE_BYTES) -> None:
        model = ModelGeometry.from_hf_config(hf_config)
        has_more = model.mtp_layers or model.list_kept() or model.prefix == DECODER
        self._checkpoint = HFCheckpoint(source, hf_config) if has_more else None
        self._sizes = self._checkpoint.list_copied_tensors(model) if self._checkpoint else {}
        self._files = cut_into_files(self._sizes, file_bytes) if self._sizes else []
        self._own = range(len(self._files) * rank // world, len(self._files) * (rank + 1) // world)
        self._writes_index = rank == 0

    @property
    def nbytes(self) -> int:
        return sum(self._sizes[name] for number in self._own for name in self._files[number])

    def write(self, to: Path) -> list[str]:
        """Write this rank's files into `MTP_FOLDER` of the checkpoint `to`. Return their paths relative to `to`. Raise OSError."""
        if not self._files:
            return []
        (folder := to / MTP_FOLDER).mkdir(exist_ok=True)
        assert self._checkpoint is not None
        for number in self._own:
            path = folder / name_file(number, len(self._files))
            write_file(path, {name: self._checkpoint.read_stored(name) for name in self._files[number]})
        if self._writes_index:
            write_index(folder, [{name: self._sizes[name] for name in names} for names in self._files])
        return [f"{MTP_FOLDER}/{name_file(number, len(self._files))}" for number in self._own]


class MTPLayers:
    """The MTP layers, the indexers and the vision tower of a checkpoint, for an export."""

    def __init__(self, checkpoint: HFCheckpoint, model: ModelGeometry) -> None:
        self._checkpoint, self._stored = checkpoint, checkpoint.list_copied_tensors(model)
        self._tensors = {name: each for name, each in (list_mtp_tensors(model) | model.list_kept()).items() if name in self._stored}
        self._scales = {name: scale for name in self._tensors if (scale := self._find_scale(name)) in self._stored}

    def _find_scale(self, name: str) -> str:
        format = self._checkpoint.find_format(self._tensors[name])
        return format.scale_name(name) if format else ""

    def count_bytes(self, contract: PrecisionContract) -> dict[str, int]:
        """Return the bytes of every tensor, with its scales, in an export with this contract."""
        result = {name: size for name, size in self._stored.items() if name not in self._scales.values()}
        for name in result:
            if (format := self._find_conversion(name, contract)) is not None:
                result[name] = format.count_bytes((self._tensors[name].rows, self._tensors[name].cols))
            elif name in self._scales:
                result[name] += self._stored[self._scales[name]]
        return result

    def read(self, name: str, contract: PrecisionContract) -> dict[str, torch.Tensor]:
        """Return a tensor and its scales as an export with this contract stores them. Raise UserError if a converted value is not
        finite."""
        if (format := self._find_conversion(name, contract)) is None:
            names = (name, self._scales[name]) if name in self._scales else (name,)
            return {stored: self._checkpoint.read_stored(stored) for stored in names}
        region = take_all(self._tensors[name])
        value = self._checkpoint.read_values(region) if name in self._scales else self._checkpoint.read_stored(name)
        return store(name, value, format)

    def _find_conversion(self, name: str, contract: PrecisionContract) -> TensorFormat | None:
        """Return the format to convert a tensor to, or None if its bytes are kept."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        format, stored = contract.format_of(tensor.role), self._checkpoint.find_format(tensor) if name in self._scales else None
        if stored is None:
            return format if format.quantized else None
        same = stored.name == format.name and (format.scale_format != "pow2" or self._has_pow2_scales(name, stored))
        return None if same else format

    def _has_pow2_scales(self, name: str, stored: TensorFormat) -> bool:
        scales = QUANTIZERS[stored.name].read_scales(self._checkpoint.read_stored(self._scales[name]))
        return bool((torch.frexp(scales).mantissa == 0.5).all())
