"""Chooses the checkpoint that a run resumes from. Does not import Megatron."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config, TrainConfig
from megatron_rl.distributed import errors_on_all_ranks, gather_from_ranks, get_rank_and_size, run_on_rank0
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.preflight.resumed_run import find_run_to_resume
from megatron_rl.versions import collect_versions
from parallel.layout import Layout


def describe_layout(layout: Layout, train: TrainConfig) -> dict[str, int]:
    """Return the layout for state.json: everything that determines the order of sums."""
    return {
        **{name: size for name, size in asdict(layout).items() if size},  # older checkpoints lack fields that are 0
        "sequence_parallel": int(layout.tp > 1 and train.layout.sequence_parallel),
        "distributed_optimizer": int(layout.dp * layout.cp > 1),  # kept for older checkpoints
    }


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    folder: Path
    state: dict[str, Any]
    damaged: dict[Path, str]  # newer checkpoints that cannot be used, with the reason

    def describe(self, layout: dict[str, int]) -> list[str]:
        """Return notices for the user, one line each."""
        lines = [f"{damaged.name} is incomplete: {reason}; the previous checkpoint is used" for damaged, reason in self.damaged.items()]
        lines.append(f"resuming from {self.folder}, step {self.state['step']}")
        if not self.matches_layout(layout):
            lines.append("it was written with another train.layout: sums are added in another order, so results differ in rounding")
        saved = self.state.get("versions", {})
        changed = [f"{name} {saved.get(name)} -> {version}" for name, version in collect_versions().items() if saved.get(name) != version]
        if changed:
            lines.append(f"it was written with other package versions, so results may differ: {', '.join(changed)}")
        return lines

    def matches_layout(self, layout: dict[str, int]) -> bool:
        return self.state.get("layout") == layout


def find_resume_point(config: Config) -> ResumePoint | None:
    """Return the checkpoint that `checkpoint.resume` selects, or None for a new run. Collective. Raises as `choose_checkpoint` does."""
    run = run_on_rank0(lambda: find_run_to_resume(config))
    return None if run is None else choose_checkpoint(run, config.train.steps)


def choose_checkpoint(run: Path, steps: int) -> ResumePoint:
    """Return the newest complete checkpoint of a run. Collective. Raises UserError if no checkpoint is complete, or if the newest one has
    reached `steps`."""
    folder, damaged = find_newest_whole(run)
    return run_on_rank0(lambda: _make_resume_point(run, folder, damaged, steps))


def find_newest_whole(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest complete checkpoint of a run, and the newer ones with what is wrong with them. Collective. The ranks divide the
    files among them and read every byte. Raises UserError if a rank cannot see the files."""
    torn: dict[Path, str] = {}
    for folder in run_on_rank0(lambda: checkpoints.list_newest_first(run)):
        with errors_on_all_ranks():
            if not folder.is_dir():
                rule = f"rank {get_rank_and_size()[0]} does not see {folder}"
                raise UserError("checkpoint.resume", str(run), rule, "name a folder that all nodes share")
        reasons = gather_from_ranks(checkpoints.find_damage(folder, *get_rank_and_size()))
        if not any(reasons):
            return folder, torn
        torn[folder] = next(filter(None, reasons))
    return None, torn


def _make_resume_point(run: Path, folder: Path | None, damaged: dict[Path, str], steps: int) -> ResumePoint:
    if folder is None:
        reasons = "; ".join(f"{checkpoint.name}: {reason}" for checkpoint, reason in damaged.items())
        fix = "start a new run with checkpoint.resume=never"
        raise UserError("checkpoint.resume", str(run), f"holds no complete checkpoint ({reasons})", fix)
    state = json.loads((folder / "state.json").read_bytes())
    if state["step"] >= steps:
        raise UserError("train.steps", steps, f"{folder} is already at step {state['step']}", "raise it, or start a new run")
    if "adam_step" not in state:
        raise UserError("checkpoint.resume", str(run), f"{folder.name} holds only weights", "start a new run from its export")
    return ResumePoint(folder, state, damaged)
