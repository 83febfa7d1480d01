"""The command `train`: checks everything that can be checked cheaply, brings up trainer and engine, runs the loop, cleans up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.cross_checks import check_lengths, check_placement, check_trainer_layout
from megatron_rl.data import check_data
from megatron_rl.errors import UserError
from megatron_rl.hf.config import parse_forward_config, rope_theta
from megatron_rl.hf.create import make_hf_config
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.precision.backends import requirements
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rewards.scorer import check_rewards
from megatron_rl.rollout.engine_placement import check_engine_placement
from megatron_rl.rollout.engine_pool import check_devices
from megatron_rl.rollout.environments.base import load_environment
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.transport_check import check_transport
from megatron_rl.training.resume import find_run_to_resume
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError


def run_training(config: Config) -> Path:
    """Trains as configured; returns the run's folder. Under torchrun every rank calls it.

    Raises UserError before anything heavy starts, RunError when the run breaks; a broken run keeps its log and a last checkpoint.
    """
    layout = preflight(config)
    resumed = find_run_to_resume(config)
    from megatron_rl.training.session import run_session

    return run_session(config, layout, resumed)


def preflight(config: Config, data: bool = True) -> Layout:
    """All checks that need no process: modes, world size, files, model widths, FP8 blocks, the checkpoint's tensors. Returns the layout.

    `data`: the files of problems and the reward functions as well, which not every command uses.
    """
    requirements.check_machine(config.precision)
    layout = _layout(config)
    parts = config.algorithm.updates_per_step
    if config.rollout.prompts_per_step % parts:
        rule = f"must divide rollout.prompts_per_step ({config.rollout.prompts_per_step})"
        raise UserError("algorithm.updates_per_step", parts, rule, "change one of them")
    if config.algorithm.calibrate_every and config.precision.mode != "fp8_unified":
        rule = f"calibrates FP8 ratios, which precision.mode {config.precision.mode} has none of in the trainer"
        raise UserError("algorithm.calibrate_every", config.algorithm.calibrate_every, rule, "set it to 0, or use fp8_unified")
    check_placement(config)
    check_transport(config.sync, shared=config.placement.kind == "colocated")
    check_engine_placement(config)
    check_devices(config)
    check_waits(config)
    check_environment(config)
    _check_model(config, layout)
    if data:
        check_data(config.data, config.model.path)
        if os.environ.get("RANK", "0") == "0":  # the only rank that scores
            check_rewards(config.reward)
    return layout


def _layout(config: Config) -> Layout:
    """Return the trainer's layout. Raise UserError where it is none, or does not fit the number of processes that were launched."""
    layout = config.train.layout.to_layout()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if layout.world_size != launched:
        rule = f"needs {layout.world_size} ranks (tp * cp * pp * dp), this launch has {launched}"
        fix = f"start with torchrun --nproc-per-node {layout.world_size}, or change train.layout"
        raise UserError("train.layout", None, rule, fix)
    return layout


def check_waits(config: Config) -> None:
    """Raises UserError where a wait that is allowed would count as a standstill."""
    waits = {"rollout.request_timeout": config.rollout.request_timeout, "sync.timeout": config.sync.timeout}
    name = max(waits, key=lambda field: waits[field])
    if 0 < config.log.stuck_after <= waits[name]:
        rule = f"must be longer than {name} ({waits[name]:g})"
        raise UserError("log.stuck_after", config.log.stuck_after, rule, f"raise it, lower {name}, or set it to 0")


def _check_model(config: Config, layout: Layout) -> None:
    folder = config.model.path
    if (folder / "config.json").is_file() or config.model.create is None:
        hf_config = read_config(folder)
        _check_same_model(config, hf_config)
    else:
        if folder.exists():
            raise UserError("model.path", str(folder), "exists but holds no config.json", "remove it, or name another folder")
        hf_config = make_hf_config(config.model.create, 0, config.precision.high)
    parse_forward_config(hf_config)
    try:
        geometry = ModelGeometry.from_hf_config(hf_config)
        check_trainer_layout(geometry, layout, config.train.layout)
        _check_experts(config, geometry)
        SyncPlan.from_config(geometry, layout, config)
        requirements.check_model(config.precision, geometry, layout)
    except GeometryError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None
    check_lengths(config, hf_config)
    if folder.exists():
        _check_weights(config, hf_config, geometry)


def _check_experts(config: Config, geometry: ModelGeometry) -> None:
    """Raises UserError for a setting of routers that the model does not have: it would be ignored without a word."""
    settings = {
        "train.router_aux_loss": config.train.router_aux_loss,
        "train.router_bias_rate": config.train.router_bias_rate,
        "algorithm.routing_replay": "" if config.algorithm.routing_replay == "none" else config.algorithm.routing_replay,
    }
    for field, value in settings.items():
        if value and geometry.experts is None:
            raise UserError(field, value, f"needs a model with experts, {geometry.kind} has none", "leave it out")
    if config.train.router_bias_rate and not geometry.experts.correction_bias:  # type: ignore[union-attr]
        rule = f"needs routers with a correction bias (DeepSeek-V3), {geometry.kind} has none"
        raise UserError("train.router_bias_rate", config.train.router_bias_rate, rule, "use train.router_aux_loss")


def _check_weights(config: Config, hf_config: dict[str, Any], geometry: ModelGeometry) -> None:
    """Names, shapes and dtypes from the files' headers, and an FP8 checkpoint's scales; the weights themselves are read at loading."""
    checkpoint, contract = HFCheckpoint(config.model.path, hf_config), PrecisionContract.from_config(config.precision)
    checkpoint.check(geometry)
    checkpoint.check_scales(geometry.tensors().values(), contract.scale_format if contract.train_fp8 else None)


def check_environment(config: Config) -> None:
    """That the environment can be imported, and that worked examples which use it exist."""
    environment = config.environment
    if environment is not None:
        load_environment(environment.name)
    if config.model.warm_start.tool_share and (environment is None or environment.name != "calculator"):
        rule = "shows calls of the calculator, which the run does not have"
        raise UserError(
            "model.warm_start.tool_share", config.model.warm_start.tool_share, rule, 'add [environment] with name = "calculator"'
        )


def _check_same_model(config: Config, hf_config: dict[str, Any]) -> None:
    """A checkpoint made earlier is reused; widths changed since would be ignored without a word, so they are refused."""
    if config.model.create is None:
        return
    for name, wanted in config.model.create.model_dump().items():
        found = rope_theta(hf_config) if name == "rope_theta" else hf_config.get(name, 0 if name == "num_experts" else wanted)
        if found != wanted:
            fix = "remove that folder, name another model.path, or set it back"
            raise UserError(f"model.create.{name}", wanted, f"the checkpoint already at {config.model.path} has {found}", fix)
