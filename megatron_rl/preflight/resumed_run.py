"""Choice of the run to resume. Settings that affect its results must not have changed."""

import json
from pathlib import Path

from pydantic import ValidationError

from megatron_rl.config import Config
from megatron_rl.config.base import flatten
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.observability.run_log import read_run
from megatron_rl.preflight.rule import Facts, Needs, rule

_CHANGEABLE_FIELDS = (
    "train.steps", "train.layout", "train.overlap_grad_reduce", "train.overlap_param_gather", "train.two_batch_overlap", "train.recompute",
    "rollout.engines", "rollout.tp", "rollout.ep",
    "rollout.nodes_per_engine", "rollout.hosts", "rollout.max_running_requests", "rollout.max_total_tokens", "rollout.start_timeout",
    "rollout.enable_prefix_caching", "rollout.chunked_prefill_size",
    "rollout.request_timeout", "rollout.health_timeout", "rollout.max_restarts", "placement.kind",
    "data.eval_every", "eval", "reward.workers", "reward.timeout", "reward.memory_mb", "sync", "checkpoint", "log",
)  # fmt: skip
"""Fields that may change: they do not affect results, or the run prints a notice (a layout changes the order of sums)."""


@rule(Needs.TASK | Needs.TRAINER)
def resumed_run_has_the_same_settings(facts: Facts) -> None:
    find_run_to_resume(facts.config)


def find_run_to_resume(config: Config) -> Path | None:
    """Return the folder of the run to resume, or None for a new run. Raise UserError if a setting that affects results has changed."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        folder = config.log.dir / "latest"
        if not (folder / "run.json").is_file() or not checkpoints.list_newest_first(folder) or read_run(folder)["status"] == "finished":
            return None
    else:
        folder = Path(resume)
        if not checkpoints.list_newest_first(folder):
            fix = "give the folder of a run that wrote a checkpoint, or use auto"
            raise UserError("checkpoint.resume", resume, "has no checkpoints/step_NNNNN", fix)
    folder = folder.resolve()
    _check_same_settings(config, _saved_config(folder), folder)
    return folder


def _saved_config(run: Path) -> Config:
    """Return the configuration of a run. Fields that did not exist yet get their defaults."""
    try:
        saved = read_run(run).get("config") or {}
        saved.get("train", {}).pop("distributed_optimizer", None)  # old runs have it; it only placed Adam's state
        return Config.model_validate_json(json.dumps(saved))
    except ValidationError:
        rule = "has a configuration that this version of megatron-rl does not support"
        raise UserError("checkpoint.resume", str(run), rule, "resume with the version that wrote it, or start a new run") from None


def _check_same_settings(config: Config, saved: Config, run: Path) -> None:
    saved_values, values = (flatten(each.model_dump(mode="json")) for each in (saved, config))
    for name in {**values, **saved_values}:  # includes sections that only the saved run has
        value = values.get(name)
        if value != saved_values.get(name) and not any(name == field or name.startswith(f"{field}.") for field in _CHANGEABLE_FIELDS):
            fix = "restore the old value, or start a new run with checkpoint.resume=never"
            raise UserError(name, value, f"differs from the resumed run {run}, which has {saved_values.get(name)!r}", fix)
