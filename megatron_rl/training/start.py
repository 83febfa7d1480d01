"""The start of a trainer and of engines without weights, which a run and the commands `graph` and `locate` have in common."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import Config
from megatron_rl.distributed import errors_on_all_ranks, run_on_rank0
from megatron_rl.hf.hub import fetch_weights
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.model import start_megatron, stop_megatron
from megatron_rl.observability.signals import install_signal_handlers
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.threads import count_threads
from megatron_rl.preflight import Needs, check_on_rank_0
from megatron_rl.rollout.engine_pool import EnginePool, start_engines
from parallel.layout import Layout


def start_trainer(config: Config, layout: Layout, known: Needs, resources: ExitStack, timeout_minutes: int = 30) -> None:
    """Start Megatron, make the checks `known` that only rank 0 makes, and fetch the weights. `resources` stops Megatron, also on SIGTERM.
    `timeout_minutes`: of collectives. Collective."""
    install_signal_handlers(alone=layout.world_size == 1)
    start_megatron(layout, config.train.seed, timeout_minutes)
    resources.callback(stop_megatron)
    if not torch.cuda.is_available():
        torch.set_num_threads(count_threads(layout.world_size))
    run_on_rank0(lambda: check_on_rank_0(config, known))
    with errors_on_all_ranks():  # rank 0 has fetched the weights; nodes with separate caches fetch them too
        fetch_weights(config.model.path)


def start_empty_engines(
    config: Config, hf_config: Mapping[str, Any], folder: Path, logs: Path, notify: Callable[[str], None] = print, version: int = 0
) -> EnginePool:
    """Start the engines without weights. `folder`: an empty folder for their config.json and tokenizer; `version`: see `start_engines`.
    Rank 0 only."""
    weights = describe_weights(hf_config, PrecisionContract.from_config(config.precision))
    write_all_but_weights(folder, weights, config.model.folder)
    return start_engines(config, folder, logs, notify, empty=True, version=version)
