"""Chooses the checkpoint that a run resumes from, and compares the models that it reads. Does not import Megatron."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from megatron_rl.config import Config, TrainConfig
from megatron_rl.config.base import flatten
from megatron_rl.config.reading import reading
from megatron_rl.distributed import errors_on_all_ranks, gather_from_ranks, get_rank_and_size, run_on_rank0
from megatron_rl.errors import UserError
from megatron_rl.hf.files import list_model_files, read_config
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.plugs import REWARDS
from megatron_rl.preflight.resumed_run import ResumedRun, find_run_to_resume, with_names
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
        if not checkpoints.has_digest(self.state):
            lines.append("an older version wrote its state.json without a digest, so damage to that file would not be noticed")
        if not self.matches_layout(layout):
            lines.append("it was written with another train.layout: sums are added in another order, so results differ in rounding")
        saved = self.state.get("versions", {})
        changed = [f"{name} {saved.get(name)} -> {version}" for name, version in collect_versions().items() if saved.get(name) != version]
        if changed:
            lines.append(f"it was written with other package versions, so results may differ: {', '.join(changed)}")
        return lines

    def matches_layout(self, layout: dict[str, int]) -> bool:
        return self.state.get("layout") == layout


class _FoundRun(NamedTuple):
    """What rank 0 tells the other ranks about the run to resume."""

    folder: Path
    names: dict[str, list[str]]  # of the data sets, by field of `data`
    changes: dict[str, tuple[Any, Any]]
    models: dict[str, str]


def find_resume_point(config: Config) -> tuple[ResumedRun, ResumePoint] | None:
    """Return the run that `checkpoint.resume` selects and its checkpoint, or None for a new run. Collective. Raises as `choose_checkpoint`
    does, and UserError if a model has other files."""

    def find() -> _FoundRun | None:
        run = find_run_to_resume(config)
        if run is None:
            return None
        names = {field: [each.name for each in getattr(run.config.data, field)] for field in ("train", "eval")}
        return _FoundRun(run.folder, names, run.changes, run.models)

    found = run_on_rank0(find, _FoundRun | None)
    if found is None:
        return None
    run = ResumedRun(found.folder, with_names(config, found.names), found.changes, found.models)
    point = choose_checkpoint(run.folder, config.train.steps)
    models = hash_models(config)
    for field, after in models.items():
        before = run.models.get(field)
        if before not in (None, after) and field not in run.changes:  # other files at the same path
            path = flatten(config.model_dump(mode="json"))[field]
            run = replace(run, changes={**run.changes, field: (f"{path} with hash {before}", f"{path} with hash {after}")})
        if field in run.changes and before != after and not run.is_named(field):
            raise run.refuse(field, "the run has no hashes of its files" if before is None else "its files are others")
    if "model.path" in run.changes:
        _check_architecture(config, point.folder)
    return replace(run, models=models), point


def hash_models(config: Config) -> dict[str, str]:
    """Return a hash of every model that the run reads, by field. Collective: the ranks divide the files among them and read every byte."""
    folders = {"model.path": config.model.folder}
    if config.teacher is not None:
        folders["teacher.path"] = config.teacher.path
    if config.algorithm.has_critic and config.critic.path is not None:
        folders["critic.path"] = config.critic.path
    rank, size = get_rank_and_size()
    files = [(field, folder, file) for field, folder in folders.items() for file in list_model_files(folder)]
    hashes: dict[str, dict[str, str]] = {field: {} for field in folders}
    with errors_on_all_ranks():
        for field, folder, file in files[rank::size]:
            try:
                with file.open("rb") as opened:
                    hashes[field][str(file.relative_to(folder))] = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
            except OSError as error:
                raise UserError(field, str(file), f"cannot be read ({error.strerror})", "check its permissions") from None
    for part in gather_from_ranks(hashes, dict[str, dict[str, str]]):
        for field in folders:
            hashes[field] |= part[field]
    return {field: xxhash.xxh3_128_hexdigest(json.dumps(hashes[field], sort_keys=True).encode()) for field in folders}


def hash_code(config: Config) -> dict[str, str]:
    """Return a hash of the file of every plug of the user's own, by field. What such a file imports is not part of it."""
    hashes = {}
    for field, name in flatten(config.model_dump(mode="json", exclude={"log"})).items():
        if isinstance(name, str) and REWARDS.is_own(name):  # a name of one kind has the form of all
            with suppress(ImportError, OSError, ValueError):
                spec = find_spec(name.partition(":")[0])
                if spec is not None and spec.has_location and spec.origin:
                    hashes[field] = xxhash.xxh3_128_hexdigest(Path(spec.origin).read_bytes())
    return hashes


def _check_architecture(config: Config, checkpoint: Path) -> None:
    """Raise UserError if another model does not fit the checkpoint."""
    saved, given = (config.make_trained_geometry(read_config(folder)) for folder in (checkpoint / "hf", config.model.folder))
    if saved != given:
        rule = f"has another architecture than {checkpoint}"
        raise UserError("model.path", str(config.model.path), rule, "give a model of the same architecture, or start a new run")


def choose_checkpoint(run: Path, steps: int) -> ResumePoint:
    """Return the newest complete checkpoint of a run. Collective. Raises UserError if no checkpoint is complete, or if the newest one has
    reached `steps`."""
    folder, damaged = find_newest_whole(run)
    return run_on_rank0(lambda: _make_resume_point(run, folder, damaged, steps), ResumePoint)


def find_newest_whole(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest complete checkpoint of a run, and the newer ones with what is wrong with them. Collective. The ranks divide the
    files among them and read every byte. Raises UserError if a rank cannot see the files."""
    torn: dict[Path, str] = {}
    for folder in run_on_rank0(lambda: checkpoints.list_newest_first(run), list[Path]):
        with errors_on_all_ranks():
            if not os.path.isdir(folder):
                rule = f"rank {get_rank_and_size()[0]} does not see {folder}"
                raise UserError("checkpoint.resume", str(run), rule, "name a folder that all nodes share")
        reasons = gather_from_ranks(checkpoints.find_damage(folder, *get_rank_and_size()), str)
        if not any(reasons):
            return folder, torn
        torn[folder] = next(filter(None, reasons))
    return None, torn


def _make_resume_point(run: Path, folder: Path | None, damaged: dict[Path, str], steps: int) -> ResumePoint:
    if folder is None:
        reasons = "; ".join(f"{checkpoint.name}: {reason}" for checkpoint, reason in damaged.items())
        fix = "start a new run with checkpoint.resume=never"
        raise UserError("checkpoint.resume", str(run), f"holds no complete checkpoint ({reasons})", fix)
    with reading("checkpoint.resume", str(folder), "start a new run with checkpoint.resume=never"):
        state = checkpoints.read_state_file(folder)
    if state["step"] >= steps:
        raise UserError("train.steps", steps, f"{folder} is already at step {state['step']}", "raise it, or start a new run")
    if "adam_step" not in state:
        raise UserError("checkpoint.resume", str(run), f"{folder.name} holds only weights", "start a new run from its export")
    return ResumePoint(folder, state, damaged)
