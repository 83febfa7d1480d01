"""Which run is resumed, from which checkpoint, and whether this configuration may. Needs neither torch nor Megatron."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_rl.config import Config, TrainConfig
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.observability.run_log import read_run
from megatron_rl.versions import collect_versions
from parallel.layout import Layout

_CHANGEABLE_FIELDS = (
    "train.steps", "train.layout", "train.distributed_optimizer", "train.recompute", "rollout.engines", "rollout.tp", "rollout.ep",
    "rollout.hosts", "rollout.max_running_requests", "rollout.max_total_tokens", "rollout.start_timeout", "rollout.request_timeout",
    "rollout.health_timeout", "rollout.max_restarts", "placement.kind",
    "data.eval_every", "reward.workers", "reward.timeout", "reward.memory_mb", "sync", "checkpoint", "log",
)  # fmt: skip
"""Fields that may differ: they decide no number, or a notice says that they do (a layout changes the order of sums)."""


def describe_layout(layout: Layout, train: TrainConfig) -> dict[str, int]:
    """Return how ranks share the work, for state.json: all that decides the order of sums."""
    return {
        **asdict(layout),
        "sequence_parallel": int(layout.tp > 1 and train.layout.sequence_parallel),
        "distributed_optimizer": int(layout.dp * layout.cp > 1 and train.distributed_optimizer),
    }


def find_run_to_resume(config: Config) -> Path | None:
    """Return the folder of the run to resume, None for a new run; see `checkpoint.resume`.

    Raises UserError, naming the field, if another value of it decided that run's numbers.
    """
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
            fix = "give the folder of a run that wrote a checkpoint, or set it to auto"
            raise UserError("checkpoint.resume", resume, "holds no checkpoints/step_NNNNN", fix)
    folder = folder.resolve()
    _check_same_settings(config, _saved_config(folder), folder)
    return folder


def _saved_config(run: Path) -> Config:
    """Return the run's configuration; fields added since get their defaults."""
    try:
        return Config.model_validate_json(json.dumps(read_run(run).get("config")))
    except ValidationError:
        rule = "its configuration is none that this version of the project knows"
        raise UserError("checkpoint.resume", str(run), rule, "go on with the version that wrote it, or start a new run") from None


def _check_same_settings(config: Config, saved: Config, run: Path) -> None:
    saved_values = _flatten(saved.model_dump(mode="json"))
    for name, value in _flatten(config.model_dump(mode="json")).items():
        if value != saved_values.get(name) and not any(name == field or name.startswith(f"{field}.") for field in _CHANGEABLE_FIELDS):
            fix = "set it back, or start a new run with checkpoint.resume=never"
            raise UserError(name, value, f"the run that goes on, {run}, has {saved_values.get(name)!r}", fix)


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return "section.key" -> value."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    folder: Path
    state: dict[str, Any]
    damaged: dict[Path, str]
    """Newer checkpoints -> what is wrong with them."""

    def describe(self, layout: dict[str, int]) -> list[str]:
        """Return the notices for the user, one line each."""
        lines = [f"{damaged.name} is not whole: {reason}; the checkpoint before it is used" for damaged, reason in self.damaged.items()]
        lines.append(f"going on from {self.folder}, step {self.state['step']}")
        if not self.matches_layout(layout):
            lines.append("another train.layout wrote it: sums are added in another order, so the numbers differ in rounding")
        saved = self.state.get("versions", {})
        changed = [f"{name} {saved.get(name)} -> {version}" for name, version in collect_versions().items() if saved.get(name) != version]
        if changed:
            lines.append(f"other versions wrote it, so numbers may differ: {', '.join(changed)}")
        return lines

    def matches_layout(self, layout: dict[str, int]) -> bool:
        return self.state.get("layout") == layout


def choose_checkpoint(run: Path, steps: int) -> ResumePoint:
    """Return the newest whole checkpoint of a run; read every byte of it.

    Raises UserError if none is whole, or if it leaves none of `steps` to do.
    """
    folder, damaged = checkpoints.find_newest_whole(run)
    if folder is None:
        reasons = "; ".join(f"{checkpoint.name}: {reason}" for checkpoint, reason in damaged.items())
        fix = "start a new run with checkpoint.resume=never"
        raise UserError("checkpoint.resume", str(run), f"holds no whole checkpoint ({reasons})", fix)
    state = json.loads((folder / "state.json").read_bytes())
    if state["step"] >= steps:
        raise UserError("train.steps", steps, f"{folder} is at step {state['step']} already", "raise it, or start a new run")
    if "adam_step" not in state:
        raise UserError("checkpoint.resume", str(run), f"{folder.name} holds weights alone", "start a new run from its export")
    return ResumePoint(folder, state, damaged)
