"""The command `train`: checks everything that can be checked cheaply, then runs a session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_rl.algorithm.trial import try_algorithm
from megatron_rl.config import Config
from megatron_rl.config.cross_checks import check_lengths, check_placement, check_trainer_layout
from megatron_rl.data import check_data
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.config import parse_forward_config, rope_theta
from megatron_rl.hf.create import make_hf_config
from megatron_rl.hf.files import read_config
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.observability.trackers import check_trackers
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


def run_training(config: Config) -> Path:
    """Train as configured and return the run's folder. Under torchrun every rank calls it.

    Raises UserError before anything heavy starts, RunError when the run breaks; a broken run keeps its log and a last checkpoint.
    """
    layout = preflight(config)
    resumed = find_run_to_resume(config)
    from megatron_rl.training.session import run_session

    return run_session(config, layout, resumed)


def preflight(config: Config, data: bool = True) -> Layout:
    """Check all that needs no process: modes, world size, files, model widths, FP8 blocks, the checkpoint's tensors. Return the layout.

    `data`: check problem files and reward functions as well, which not every command uses.
    """
    requirements.check_machine(config.precision)
    layout = _check_layout(config)
    _check_algorithm(config)
    try_algorithm(config.algorithm)
    check_placement(config)
    check_transport(config.sync, shared=config.placement.kind == "colocated")
    check_engine_placement(config)
    check_devices(config)
    check_waits(config)
    check_environment(config)
    _check_model(config, layout)
    if data:
        check_data(config.data, config.model.path)
        if os.environ.get("RANK", "0") == "0":  # the only rank that scores and logs
            check_rewards(config.reward)
            check_trackers(config.log.trackers)
    return layout


def _check_algorithm(config: Config) -> None:
    algorithm, prompts = config.algorithm, config.rollout.prompts_per_step
    if prompts % algorithm.updates_per_step:
        rule = f"must divide rollout.prompts_per_step ({prompts})"
        raise UserError("algorithm.updates_per_step", algorithm.updates_per_step, rule, "change one of them")
    if algorithm.calibrate_every and config.precision.mode != "fp8_unified":
        rule = f"calibrates FP8 ratios, which precision.mode {config.precision.mode} has none of in the trainer"
        raise UserError("algorithm.calibrate_every", algorithm.calibrate_every, rule, "set it to 0, or use fp8_unified")


def _check_layout(config: Config) -> Layout:
    """Return the trainer's layout. Raises UserError if it is invalid or does not fit the number of processes that were launched."""
    layout = config.train.layout.to_layout()
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if layout.world_size != launched:
        rule = f"needs {layout.world_size} ranks (tp * cp * pp * dp), this launch has {launched}"
        fix = f"start with torchrun --nproc-per-node {layout.world_size}, or change train.layout"
        raise UserError("train.layout", None, rule, fix)
    return layout


def check_waits(config: Config) -> None:
    """Raise UserError if a wait within a timeout would count as a hang."""
    timeouts = {"rollout.request_timeout": config.rollout.request_timeout, "sync.timeout": config.sync.timeout}
    name = max(timeouts, key=lambda field: timeouts[field])
    if 0 < config.log.stuck_after <= timeouts[name]:
        rule = f"must be longer than {name} ({timeouts[name]:g})"
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
    with as_user_error():
        geometry = ModelGeometry.from_hf_config(hf_config)
        check_trainer_layout(geometry, layout, config.train.layout)
        _check_experts(config, geometry)
        SyncPlan.from_config(geometry, layout, config)
        requirements.check_model(config.precision, geometry, layout)
    check_lengths(config, hf_config)
    if folder.exists():
        _check_weights(config, hf_config, geometry)


def _check_experts(config: Config, geometry: ModelGeometry) -> None:
    """Raise UserError for a router setting that the model has no use for: it would be ignored silently."""
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
    """Check names, shapes and dtypes in the files' headers, and an FP8 checkpoint's scales; the weights are read at loading."""
    checkpoint, contract = HFCheckpoint(config.model.path, hf_config), PrecisionContract.from_config(config.precision)
    checkpoint.check(geometry)
    checkpoint.check_scales(geometry.tensors().values(), contract.scale_format if contract.train_fp8 else None)


def check_environment(config: Config) -> None:
    """Check that the environment can be imported, and that the warm start's worked examples fit it."""
    environment = config.environment
    if environment is not None:
        with as_user_error():
            load_environment(environment.name)
    if config.model.warm_start.tool_share and (environment is None or environment.name != "calculator"):
        rule = "shows calls of the calculator, which the run does not have"
        raise UserError(
            "model.warm_start.tool_share", config.model.warm_start.tool_share, rule, 'add [environment] with name = "calculator"'
        )


def _check_same_model(config: Config, hf_config: dict[str, Any]) -> None:
    """Raise UserError for widths that differ from the checkpoint made earlier, which is reused: they would be ignored silently."""
    if config.model.create is None:
        return
    for name, value in config.model.create.model_dump().items():
        existing = rope_theta(hf_config) if name == "rope_theta" else hf_config.get(name, 0 if name == "num_experts" else value)
        if existing != value:
            fix = "remove that folder, name another model.path, or set it back"
            raise UserError(f"model.create.{name}", value, f"the checkpoint already at {config.model.path} has {existing}", fix)
