"""A run's checkpoints: Megatron's distributed checkpoint of the FP32 masters, with the model's config and tokenizer beside it.

step_00030/
  mcore/      torch_dist, loads into any layout
  hf/         config.json and tokenizer
  state.json  step, policy version, precision; written last, so a folder without it is no checkpoint
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import ValidationError

from megatron_rl import hf
from megatron_rl.config import Precision
from megatron_rl.errors import UserError
from megatron_rl.ranks import is_rank0, on_rank0
from parallel.geometry import Shard
from parallel.layout import Layout


def save(folder: Path, model: Any, hf_config: dict[str, Any], tokenizer: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; collective. `state` must hold `precision` (the config's section) and may hold any JSON beside it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    unfinished = folder.with_name(f".{folder.name}.unfinished")

    def prepare() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        (unfinished / "mcore").mkdir(parents=True)
        (unfinished / "hf").mkdir()

    on_rank0(prepare)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(unfinished / "mcore"))
    filesystem_async._results_queue = None  # ends Megatron's helper process, which would outlive a killed trainer
    dist.barrier()
    if is_rank0():
        (unfinished / "hf" / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        for file in hf.tokenizer_files(tokenizer):
            shutil.copy(file, unfinished / "hf" / file.name)
        (unfinished / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        unfinished.rename(folder)
    dist.barrier()


def read_state(folder: Path) -> tuple[dict[str, Any], Precision]:
    """(state.json, its precision section) of a checkpoint. Raises UserError where the folder is no whole checkpoint."""
    path = folder / "state.json"
    if not path.is_file():
        raise UserError("--checkpoint", str(folder), "holds no state.json", "give a folder like RUN_DIR/checkpoints/step_00030")
    try:
        state = json.loads(path.read_text())
        return state, Precision.model_validate_json(json.dumps(state["precision"]))
    except (json.JSONDecodeError, KeyError, ValidationError) as error:
        raise UserError("--checkpoint", str(path), f"cannot be read ({type(error).__name__})", "the checkpoint is damaged") from None


def load_alone(folder: Path) -> tuple[Any, list[Shard], Precision, dict[str, Any]]:
    """(model, its shards, precision, HF config) of a checkpoint, loaded whole into this one process."""
    _, precision = read_state(folder)
    from megatron.core import dist_checkpointing

    from megatron_rl.mcore.linear import quantize_model
    from megatron_rl.mcore.model import build_model, start_megatron
    from megatron_rl.mcore.weights import rank_shards
    from megatron_rl.precision import PrecisionContract

    hf_config = hf.read_config(folder / "hf")
    start_megatron(Layout(), seed=0)
    model = build_model(hf_config, Layout(), PrecisionContract.of(precision))
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder / "mcore"))
    model.load_state_dict(loaded["model"])
    quantize_model(model)
    return model, rank_shards(hf_config, Layout(), 0), precision, hf_config
