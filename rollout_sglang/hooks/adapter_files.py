"""Adapters of an engine that loads a checkpoint and gets no sync, as `megatron-rl eval` has them: each rank reads its own part of a file
beside the model's (`parallel.adapters.ENGINE_FILE`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.hf.files import read_config
from parallel.adapters import ENGINE_FILE, AdapterGeometry, is_adapter
from parallel.digest import view_rect
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_sglang_shards
from rollout_sglang.hooks.adapters import read_settings
from rollout_sglang.rank_handler import live_tensors


def load_adapters(original: Callable[..., torch.nn.Module], self: Any, *, model_config: Any, **named: Any) -> torch.nn.Module:
    """Wrap `DefaultModelLoader.load_model`. An engine that starts empty has another loader."""
    from sglang.srt.runtime_context import get_parallel

    model, folder = original(self, model_config=model_config, **named), Path(model_config.model_path)
    settings, ranks = read_settings(), get_parallel()
    adapters = AdapterGeometry(settings["rank"], tuple(settings["targets"]))
    geometry = replace(ModelGeometry.from_hf_config(read_config(folder)), adapters=adapters)
    shards = build_sglang_shards(geometry, ranks.tp_group.world_size, ranks.tp_group.rank_in_group, ranks.moe_ep_group.world_size)
    live = live_tensors(model)
    with safe_open(folder / ENGINE_FILE, framework="pt") as file:
        for shard in (shard for shard in shards if is_adapter(shard.name)):
            for region in shard.regions:
                row, col, rows, cols = region.tensor_rect
                part = file.get_slice(region.tensor.name)[row : row + rows, col : col + cols]
                view_rect(live[shard.name], region.shard_rect).copy_(part)
    return model
