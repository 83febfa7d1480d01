"""A model of the hub, before the rules look at it: one rank asks which commit a name stands for, and every node fetches that."""

from __future__ import annotations

import os

from megatron_rl.config import Config
from megatron_rl.config.hub import HubModel
from megatron_rl.hf.hub import pin_hub_model


def pin_model(config: Config) -> Config:
    """Return the configuration with `model.path` pinned to a commit whose config.json and tokenizer are on this machine; the same one for
    a local folder. Collective in a launch of several ranks, before their process group is there. Raise UserError, on every rank, for what
    cannot be had.
    """
    if HubModel.parse(config.model.path) is None:
        return config
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        path = pin_hub_model(config.model.path)
    else:
        from megatron_rl.distributed import share_before_start  # torch, which `plan` does without

        path = pin_hub_model(share_before_start("model.path", lambda: pin_hub_model(config.model.path)))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
