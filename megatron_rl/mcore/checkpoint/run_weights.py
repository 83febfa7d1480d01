"""A run's checkpoints: Megatron's distributed checkpoint, with the model's config and tokenizer beside it.

step_00030/
  mcore/      torch_dist, loads into any layout: weights, FP32 masters, both moments of Adam, each rank's random number generators
  hf/         config.json and tokenizer
  mtp/        layers for multi-token prediction, where the model came with some that are not trained: safetensors as in `model.path`
  state.json  step, policy version, precision, layout, state of data and algorithm, and sizes and hashes of all other files;
              written last, so a folder without it is no checkpoint

It holds no FP8 blocks: they are made from the masters, which have the weights' names. Blocks adopted from an imported FP8 checkpoint are
adopted from there again, and kept while the loaded master is theirs. Of a run with `[lora]` it holds the adapters alone, their settings in
state.json as `lora`, and as `base` where the other weights come from.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import UserError
from parallel.digest import view_rect
from parallel.layout import Coordinates, Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import MEGATRON_PREFIX
from parallel.shards import Region


def read_state(folder: Path, of_adapters: bool = False) -> tuple[dict[str, Any], PrecisionConfig]:
    """Return (state.json, its precision section) of a checkpoint. Raise UserError where they are missing or cannot be read, or it holds
    adapters alone, unless they are what is asked for (`of_adapters`)."""
    path = folder / "state.json"
    if not path.is_file():
        raise UserError("--checkpoint", str(folder), "holds no state.json", "give a folder like RUN_DIR/checkpoints/step_00030")
    try:
        state = json.loads(path.read_text())
        precision = PrecisionConfig.model_validate_json(json.dumps(state["precision"]))
    except (json.JSONDecodeError, KeyError, ValidationError) as error:
        raise UserError("--checkpoint", str(path), f"cannot be read ({type(error).__name__})", "the checkpoint is damaged") from None
    if "lora" in state and not of_adapters:
        rule = "holds the adapters of a run with [lora] alone"
        raise UserError("--checkpoint", str(folder), rule, "write them in PEFT's format by `megatron-rl export`")
    return state, precision


class RunWeights:
    """The weights of a run's checkpoint as Hugging Face tensors, whatever layout wrote it: FP32 masters of quantised layers, everything
    else in the run's `precision.high`.

    Holds one parameter of Megatron's at a time: the last one that was read, as its tensors are asked for one after the other.
    """

    def __init__(self, folder: Path, model: ModelGeometry) -> None:
        """`model`: without the layers for multi-token prediction, which are read where the checkpoint has trained ones (`model`)."""
        self._folder, self._reader = folder, FileSystemReader(folder / "mcore")
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = metadata.state_dict_metadata
        self.model = replace(model, trains_mtp=any(name.startswith(MEGATRON_PREFIX) for name in self._stored))
        self._chunks: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self._parts: dict[str, list[tuple[str, Region]]] = defaultdict(list)
        """Tensor -> parameters that hold a part of it, and which."""
        for shard in build_megatron_shards(self.model, Layout(), Coordinates()):
            for region in shard.regions:
                self._parts[region.tensor.name].append((shard.name, region))
        self._last = "", torch.empty(0)

    def read_values(self, region: Region) -> torch.Tensor:
        """Return the region's rectangle of its tensor: [rows, cols], or [rows] for a vector. Raise UserError for inf or NaN."""
        tensor, parts = region.tensor, self._parts[region.tensor.name]
        whole = self._read_parameter(parts[0][0]).new_empty(tensor.rows if tensor.vector else (tensor.rows, tensor.cols))
        for name, part in parts:
            view_rect(whole, part.tensor_rect).copy_(view_rect(self._read_parameter(name), part.shard_rect))
        if not whole.isfinite().all():
            raise UserError("--checkpoint", str(self._folder), f"tensor {tensor.name} holds inf or NaN", "give an earlier checkpoint")
        return view_rect(whole, region.tensor_rect)

    def _read_parameter(self, name: str) -> torch.Tensor:
        if self._last[0] != name:
            self._last = "", torch.empty(0)  # free it first
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
    """Return where Megatron stores a parameter: one of the tensors `stored`, which stacks the experts of a layer, and layers too where all
    are alike, and the place in that stack."""
    layer, expert = re.search(r"\.layers\.(\d+)\.", name), re.search(r"\.local_experts\.(\d+)\.", name)
    key, experts = re.sub(r"\.local_experts\.\d+\.", ".experts.", name), (int(expert[1]),) if expert else ()
    if layer is None or key in stored:
        return key, experts
    return key.replace(layer[0], ".layers.", 1), (int(layer[1]), *experts)


class _OneTensor(DefaultLoadPlanner):
    """Gives the reader one tensor to fill."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.tensor
