"""A run folder with one checkpoint, of a model that answers some problems right: a short warm start and no engine."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.hf import write
from megatron_rl.mcore.checkpoint import load
from megatron_rl.mcore.load_weights import build_own_shards, load_checkpoint
from megatron_rl.mcore.model import build_model, start_megatron
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.training.sft_warmup import make_warm_start_checkpoint
from parallel.layout import Layout


def make_run(config: Config, folder: Path, step: int) -> Path:
    """Makes `config.model` and saves it as the checkpoint of `step` in the run folder `folder`; returns the checkpoint."""
    layout = Layout()
    start_megatron(layout, 0)
    make_warm_start_checkpoint(config, layout, print)
    hf_config = write.read_config(config.model.path)
    model = build_model(hf_config, layout, PrecisionContract.from_config(config.precision))
    load_checkpoint(model, config.model.path, build_own_shards(hf_config, layout))
    saved = folder / "checkpoints" / f"step_{step:05d}"
    state = {"step": step, "policy_version": step, "precision": config.precision.model_dump(mode="json")}
    (folder / "checkpoints").mkdir(parents=True)
    load.save(saved, model, hf_config, config.model.path, state)
    run = {"status": "finished", "reason": "", "started": None, "ended": None, "versions": {}, "config": {}}
    (folder / "run.json").write_text(json.dumps(run))
    return saved
