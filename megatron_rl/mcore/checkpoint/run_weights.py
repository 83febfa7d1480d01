"""Reads the weights of a run's checkpoint, whatever layout wrote it.

step_00030/
  mcore/      torch_dist: weights, FP32 masters, Adam's moments, random states of all ranks; loads into any layout
  hf/         config.json and tokenizer
  mtp/        what is not trained of the source model (`hf.mtp_layers`), as safetensors
  state.json  step, policy version, precision, layout, state of data and algorithm, sizes and hashes of all other files; written last

FP8 blocks are not stored, since they are recomputed from the masters. Blocks adopted from an imported FP8 checkpoint are adopted again,
as long as the loaded master equals their values. A run with `[lora]` stores only its adapters; state.json then holds their settings as
`lora` and the path of the base model as `base`.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.reading import READ_ERRORS
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint.folder import DamagedStateError, read_state_file
from parallel.digest import view_rect
from parallel.layout import Coordinates, Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import MEGATRON_PREFIX
from parallel.shards import Region


def read_state(folder: Path, of_adapters: bool = False) -> tuple[dict[str, Any], PrecisionConfig]:
    """Return (state.json, its precision section) of a checkpoint. Raise UserError if they are missing or unreadable, or if the checkpoint
    holds only adapters and `of_adapters` is False."""
    path = folder / "state.json"
    if not os.path.isfile(path):
        raise UserError("--checkpoint", str(folder), "holds no state.json", "give a folder like RUN_DIR/checkpoints/step_00030")
    try:
        state = read_state_file(folder)
        precision = PrecisionConfig.model_validate_json(json.dumps(state["precision"]))
        if "lora" in state:
            LoraConfig.model_validate_json(json.dumps(state["lora"]))
            state["base"]
    except DamagedStateError as error:
        raise UserError("--checkpoint", str(path), str(error), "the checkpoint is damaged") from None
    except (KeyError, *READ_ERRORS) as error:  # pydantic's error is a ValueError
        raise UserError("--checkpoint", str(path), f"cannot be read ({type(error).__name__})", "the checkpoint is damaged") from None
    if "lora" in state and not of_adapters:
        rule = "contains only the adapters of a run with [lora]"
        raise UserError("--checkpoint", str(folder), rule, "export them to PEFT's format with `megatron-rl export`")
    return state, precision


class RunWeights:
    """The weights of a run's checkpoint as Hugging Face tensors. Quantized layers yield their FP32 masters; everything else has the dtype
    of `precision.high`. Holds the last parameter that was read, since its tensors are usually read one after the other."""

    def __init__(self, folder: Path, model: ModelGeometry) -> None:
        """Open the checkpoint. `self.model` is `model` with MTP layers if the checkpoint has trained ones."""
        self._folder, self._reader = folder, FileSystemReader(folder / "mcore")
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = metadata.state_dict_metadata
        self.model = replace(model, trains_mtp=any(name.startswith(MEGATRON_PREFIX) for name in self._stored))
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self._parts: dict[str, list[tuple[str, Region]]] = defaultdict(list)
        """Maps each tensor name to the parameters that hold a slice of it, with the slice."""
        for shard in build_megatron_shards(self.model, Layout(), Coordinates()):
            for region in shard.regions:
                self._parts[region.tensor.name].append((shard.name, region))
        self._last = "", torch.empty(0)

    def read_values(self, region: Region) -> torch.Tensor:
        """Return the region of its tensor: [rows, cols], or [rows] for a vector. Raise UserError for inf or NaN."""
        tensor, parts = region.tensor, self._parts[region.tensor.name]
        whole = self._read_parameter(parts[0][0]).new_empty(tensor.rows if tensor.vector else (tensor.rows, tensor.cols))
        for name, part in parts:
            view_rect(whole, part.tensor_rect).copy_(view_rect(self._read_parameter(name), part.shard_rect))
        if not whole.isfinite().all():
            raise UserError("--checkpoint", str(self._folder), f"tensor {tensor.name} holds inf or NaN", "give an earlier checkpoint")
        return view_rect(whole, region.tensor_rect)

    def _read_parameter(self, name: str) -> torch.Tensor:
        if self._last[0] != name:
            self._last = "", torch.empty(0)  # free it before reading
            self._last = name, self._read(*find_stored(name, self._stored))
        return self._last[1]

    def _read(self, key: str, index: tuple[int, ...]) -> torch.Tensor:
        stored = self._stored[key]
        assert isinstance(stored, TensorStorageMetadata), key
        if key not in self._chunks:
            by_index = self._chunks[key] = defaultdict(list)
            for chunk in stored.chunks:
                by_index[tuple(chunk.offsets[: len(index)])].append(chunk)
        shape = stored.size[len(index) :]
        wanted = ChunkStorageMetadata(torch.Size([*index, *[0] * len(shape)]), torch.Size([*[1] * len(index), *shape]))
        planner = _OneTensor(torch.empty(wanted.sizes, dtype=stored.properties.dtype))
        own = TensorStorageMetadata(stored.properties, stored.size, self._chunks[key][index])
        self._reader.read_data(LoadPlan(create_read_items_for_chunk_list(key, own, [wanted])), planner).wait()
        return planner.tensor.view(shape)


def find_stored(name: str, stored: Container[str]) -> tuple[str, tuple[int, ...]]:
    """Return (the name of the stored tensor that holds a parameter, its index there). Megatron stacks the experts of a layer, and also the
    layers if all are alike. It stores the layer of an MTP layer under an older name."""
    name = name.replace(".mtp_model_layer.", ".transformer_layer.", 1)
    layer, expert = re.search(r"\.layers\.(\d+)\.", name), re.search(r"\.local_experts\.(\d+)\.", name)
    key, experts = re.sub(r"\.local_experts\.\d+\.", ".experts.", name), (int(expert[1]),) if expert else ()
    if layer is None or key in stored:
        return key, experts
    return key.replace(layer[0], ".layers.", 1), (int(layer[1]), *experts)


class _OneTensor(DefaultLoadPlanner):
    """Load planner that fills a single tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.tensor
