"""Layers for multi-token prediction (MTP) that a model came with. They are not trained, but kept: every checkpoint of a run has a copy of
them, and every export holds them.

They lie behind the other layers, each a decoder layer with norms, a projection, an embedding and an output layer of its own. A copy in a
run's checkpoint is byte for byte. So is one in an export, but for the weights of the decoder layers where the result quantises such weights
otherwise than they are stored: config.json has one `quantization_config` for all layers, so they are converted as the other layers are.
"""

from __future__ import annotations

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
from parallel.shards import take_all

MTP_FOLDER = "mtp"
"""In a run's checkpoint: the safetensors files of these layers, and their index where they are several."""


def copy_mtp_layers(source: Path, hf_config: Mapping[str, Any], rank: int, world: int, to: Path, file_bytes: int = FILE_BYTES) -> list[str]:
    """Write the `rank`-th of `world` shares of the files into the folder `MTP_FOLDER` of a run's checkpoint `to`; return their paths in it.

    Every rank calls it, with no message between them. A rank reads headers and the tensors of its own files, one file after the other; a
    model without such layers has none. Raises UserError for a folder `source` that cannot be read, OSError where the disk is full.
    """
    model = ModelGeometry.from_hf_config(hf_config)
    if not model.mtp_layers:
        return []
    checkpoint = HFCheckpoint(source, hf_config)
    sizes = checkpoint.list_mtp_tensors(model)
    if not sizes:
        return []
    files, folder, written = cut_into_files(sizes, file_bytes), to / MTP_FOLDER, []
    folder.mkdir(exist_ok=True)
    for number in range(len(files) * rank // world, len(files) * (rank + 1) // world):
        name = name_file(number, len(files))
        write_file(folder / name, {tensor: checkpoint.read_stored(tensor) for tensor in files[number]})
        written.append(f"{MTP_FOLDER}/{name}")
    if rank == 0:
        write_index(folder, [{tensor: sizes[tensor] for tensor in names} for names in files])
    return written


class MTPLayers:
    """The layers that a checkpoint holds, to be exported."""

    def __init__(self, checkpoint: HFCheckpoint, model: ModelGeometry) -> None:
        self._checkpoint, self._stored, decoders = checkpoint, checkpoint.list_mtp_tensors(model), model.list_mtp_decoders()
        self._decoders = {name: tensor for name, tensor in decoders.items() if name in self._stored}
        self._scales = {name: scale for name in self._decoders if (scale := self._find_scale(name)) in self._stored}

    def _find_scale(self, name: str) -> str:
        format = self._checkpoint.find_format(self._decoders[name])
        return format.scale_name(name) if format else ""

    def count_bytes(self, contract: PrecisionContract) -> dict[str, int]:
        """Return the bytes of every tensor in an export of this contract, its scales included."""
        result = {name: size for name, size in self._stored.items() if name not in self._scales.values()}
        for name in result:
            if (format := self._find_conversion(name, contract)) is not None:
                result[name] = format.count_bytes((self._decoders[name].rows, self._decoders[name].cols))
            elif name in self._scales:
                result[name] += self._stored[self._scales[name]]
        return result

    def read(self, name: str, contract: PrecisionContract) -> dict[str, torch.Tensor]:
        """Return a tensor, and its scales, as an export of this contract stores them. Raise UserError for a converted inf or NaN."""
        if (format := self._find_conversion(name, contract)) is None:
            names = (name, self._scales[name]) if name in self._scales else (name,)
            return {stored: self._checkpoint.read_stored(stored) for stored in names}
        region = take_all(self._decoders[name])
        value = self._checkpoint.read_values(region) if name in self._scales else self._checkpoint.read_stored(name)
        return store(name, value, format)

    def _find_conversion(self, name: str, contract: PrecisionContract) -> TensorFormat | None:
        """Return the format that a tensor must be converted to, None where its bytes stay."""
        tensor = self._decoders.get(name)
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
