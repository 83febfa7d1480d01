"""Which run goes on, and whether this configuration may: everything about resuming that needs neither torch nor Megatron."""

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
"""What may differ: it decides no number, or is said to (a layout changes the order of sums)."""


def describe_layout(layout: Layout, train: TrainConfig) -> dict[str, int]:
    """How ranks share the work, as a checkpoint tells it: all that decides in which order sums are added."""
    return {
        **asdict(layout),
        "sequence_parallel": int(layout.tp > 1 and train.layout.sequence_parallel),
        "distributed_optimizer": int(layout.dp * layout.cp > 1 and train.distributed_optimizer),
    }


def find_run_to_resume(config: Config) -> Path | None:
    """The folder of the run that this one continues, None for a new one; see `checkpoint.resume`.

    Raises UserError, naming the field, where that run's numbers were decided by another configuration.
    """
    wanted = config.checkpoint.resume
    if wanted == "never":
        return None
    if wanted == "auto":
        folder = config.log.dir / "latest"
        if not (folder / "run.json").is_file() or not checkpoints.list_newest_first(folder) or read_run(folder)["status"] == "finished":
            return None
    else:
        folder = Path(wanted)
        if not checkpoints.list_newest_first(folder):
            fix = "give the folder of a run that wrote a checkpoint, or set it to auto"
            raise UserError("checkpoint.resume", wanted, "holds no checkpoints/step_NNNNN", fix)
    folder = folder.resolve()
    _check_same_settings(config, _saved_config(folder), folder)
    return folder


def _saved_config(run: Path) -> Config:
    """Fields that this version of the project knows and the run did not get their default."""
    try:
        return Config.model_validate_json(json.dumps(read_run(run).get("config")))
    except ValidationError:
        rule = "its configuration is none that this version of the project knows"
        raise UserError("checkpoint.resume", str(run), rule, "go on with the version that wrote it, or start a new run") from None


def _check_same_settings(config: Config, saved: Config, run: Path) -> None:
    before = _flatten(saved.model_dump(mode="json"))
    for name, now in _flatten(config.model_dump(mode="json")).items():
        if now != before.get(name) and not any(name == free or name.startswith(f"{free}.") for free in _CHANGEABLE_FIELDS):
            fix = "set it back, or start a new run with checkpoint.resume=never"
            raise UserError(name, now, f"the run that goes on, {run}, has {before.get(name)!r}", fix)


def _flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """ "section.key" -> value."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes on from."""

    folder: Path
    state: dict[str, Any]
    damaged: dict[Path, str]
    """Newer ones, and what is wrong with them."""

    def describe(self, layout: dict[str, int]) -> list[str]:
        """What the person who watches must know, one line each."""
        lines = [f"{damaged.name} is not whole: {reason}; the checkpoint before it is used" for damaged, reason in self.damaged.items()]
        lines.append(f"going on from {self.folder}, step {self.state['step']}")
        if not self.matches_layout(layout):
            lines.append("another train.layout wrote it: sums are added in another order, so the numbers differ in rounding")
        before = self.state.get("versions", {})
        changed = [f"{name} {before.get(name)} -> {now}" for name, now in collect_versions().items() if before.get(name) != now]
        if changed:
            lines.append(f"other versions wrote it, so numbers may differ: {', '.join(changed)}")
        return lines

    def matches_layout(self, layout: dict[str, int]) -> bool:
        return self.state.get("layout") == layout


def choose_checkpoint(run: Path, steps: int) -> ResumePoint:
    """The newest whole checkpoint of a run; reads every byte of it.

    Raises UserError where none is whole, or where it leaves none of `steps` to do.
    """
    folder, damaged = checkpoints.find_newest_whole(run)
    if folder is None:
        found = "; ".join(f"{name.name}: {reason}" for name, reason in damaged.items())
        raise UserError(
            "checkpoint.resume", str(run), f"holds no whole checkpoint ({found})", "start a new run with checkpoint.resume=never"
        )
    state = json.loads((folder / "state.json").read_bytes())
    if state["step"] >= steps:
        raise UserError("train.steps", steps, f"{folder} is at step {state['step']} already", "raise it, or start a new run")
    if "adam_step" not in state:
        raise UserError("checkpoint.resume", str(run), f"{folder.name} holds weights alone", "start a new run from its export")
    return ResumePoint(folder, state, damaged)
