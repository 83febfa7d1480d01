"""A run's checkpoints: Megatron's distributed checkpoint, with the model's config and tokenizer beside it.

step_00030/
  mcore/      torch_dist, loads into any layout: weights, FP32 masters, both moments of Adam, each rank's random number generators
  hf/         config.json and tokenizer
  state.json  step, policy version, precision, layout, state of data and algorithm, and sizes and hashes of all other files;
              written last, so a folder without it is no checkpoint

It holds no FP8 blocks: they are made from the masters. Blocks adopted from an imported FP8 checkpoint are adopted from there again, and
kept while the loaded master equals their values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.checkpoint import folder as checkpoints
from parallel.layout import Layout
from parallel.shards import Shard


def read_state(folder: Path) -> tuple[dict[str, Any], PrecisionConfig]:
    """Return (state.json, its precision section) of a checkpoint. Raise UserError where they are missing or cannot be read."""
    path = folder / "state.json"
    if not path.is_file():
        raise UserError("--checkpoint", str(folder), "holds no state.json", "give a folder like RUN_DIR/checkpoints/step_00030")
    try:
        state = json.loads(path.read_text())
        return state, PrecisionConfig.model_validate_json(json.dumps(state["precision"]))
    except (json.JSONDecodeError, KeyError, ValidationError) as error:
        raise UserError("--checkpoint", str(path), f"cannot be read ({type(error).__name__})", "the checkpoint is damaged") from None


def load_in_one_process(folder: Path) -> tuple[Any, list[Shard], PrecisionConfig, dict[str, Any]]:
    """Return (model, its shards, precision, HF config) of a checkpoint, loaded into this one process. Raise UserError for a damaged one."""
    _, precision = read_state(folder)
    if reason := checkpoints.find_damage(folder):
        raise UserError("--checkpoint", str(folder), f"is damaged: {reason}", "give another checkpoint of the run")
    from megatron.core import dist_checkpointing

    from megatron_rl.mcore.layers.quantized_linear import quantize_model
    from megatron_rl.mcore.load_weights import build_rank_shards
    from megatron_rl.mcore.model import build_model, start_megatron
    from megatron_rl.mcore.names import get_model_chunks
    from megatron_rl.precision.contract import PrecisionContract

    hf_config = read_config(folder / "hf")
    start_megatron(Layout(), seed=0)
    (model,) = get_model_chunks(build_model(hf_config, Layout(), PrecisionContract.from_config(precision)))
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder / "mcore"))
    model.load_state_dict(loaded["model"])
    quantize_model(model)
    return model, build_rank_shards(hf_config, Layout(), 0), precision, hf_config
