"""Choice of the run to resume, and what has changed since it stopped. `resume_rules` says what may change."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.base import flatten
from megatron_rl.config.change import EQUAL, FREELY, NAMED, NEVER
from megatron_rl.config.errors import find_nearest_field
from megatron_rl.config.reading import READ_ERRORS
from megatron_rl.data import ProblemStream
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.observability.run_folder import check_written_files, read_run
from megatron_rl.preflight.resume_rules import CHANGES, find_change, is_named
from megatron_rl.preflight.rule import Facts, Needs, rule

_ALLOW = "checkpoint.allow_changes"


@dataclass(frozen=True)
class ResumedRun:
    """The run to resume."""

    folder: Path
    config: Config  # the new configuration; data sets that have moved keep the names of the run
    changes: dict[str, tuple[Any, Any]]  # value before and after of each field that has changed
    models: dict[str, str]  # hashes of the run's models by field, {} if an older version started it

    def is_named(self, field: str) -> bool:
        return is_named(field, self.config.checkpoint.allow_changes)

    def refuse(self, field: str, rule: str = "", fix: str = "") -> UserError:
        """Return the error for a field that must not change, or only if it is named."""
        before, after = self.changes.get(field, (None, None))
        rule = f"differs from the resumed run {self.folder}, which has {before!r}{rule and f': {rule}'}"
        return UserError(field, after, rule, fix or f"restore the old value, or allow the change: {_ALLOW} = {_add(self.config, field)}")

    def describe_changes(self) -> list[dict[str, Any]]:
        """Return the entries for run.json of all changes but those of [checkpoint] and [log]."""
        shown = {name: values for name, values in self.changes.items() if not name.startswith(("checkpoint.", "log."))}
        return [describe_change(name, *values) for name, values in shown.items()]

    @property
    def may_have_other_problems(self) -> bool:
        """Whether all changes that decide the problems are named, and at least one is. A named field may have changed earlier."""
        named = [name for name in self.config.checkpoint.allow_changes if name.startswith("data.") and _may_change(name) is not FREELY]
        return bool(named) and not self._unnamed_data

    @property
    def _unnamed_data(self) -> list[str]:
        changed = (name for name in self.changes if name.startswith("data.") and _may_change(name) is EQUAL)
        return [name for name in changed if not self.is_named(name)]

    def check_problems(self, stream: ProblemStream) -> None:
        """Raise UserError if the newest checkpoint was trained on other problems, unless the change is named."""
        states = (_read_state(folder) for folder in checkpoints.list_newest_first(self.folder))
        saved: dict[str, Any] = next((state["data"] for state in states if state.get("data")), {})
        if saved.get("fingerprint", stream.fingerprint) == stream.fingerprint or self.may_have_other_problems:
            return
        if self._unnamed_data:
            raise self.refuse(self._unnamed_data[0], "the problems or their order are others than those of its checkpoint")
        for field, template in stream.templates.items():
            if saved.get("templates", {}).get(field, template) != template:
                what = "the file" if field == "data.prompt_template_file" else "the tokenizer's chat template"
                rule, fix = f"{what} has changed since the checkpoint, so prompts differ", f"restore it, or allow the change: {_ALLOW}"
                raise UserError(
                    field,
                    self.config.data.prompt_template_file if field.endswith("file") else True,
                    rule,
                    f"{fix} = {_add(self.config, field)}",
                )
        rule, fix = "are others than those of the resumed run, although the fields are equal", "restore the files, or allow the change"
        raise UserError("data", None, f"the problems or their order {rule}", f"{fix}: {_ALLOW} = {_add(self.config, 'data.train.source')}")


@rule(Needs.TASK | Needs.TRAINER)
def resumed_run_has_the_same_settings(facts: Facts) -> None:
    run = find_run_to_resume(facts.config)
    if run is not None:
        stream = facts.problems if run.config.data == facts.config.data else Facts(run.config).problems
        run.check_problems(stream)


@rule(Needs.TRAINER)
def allowed_changes_are_fields(facts: Facts) -> None:
    for name in facts.config.checkpoint.allow_changes:
        rows = [row for field, row in CHANGES.items() if is_named(field, (name,))] or [row for row in [find_change(name)] if row]
        if not rows or ("." not in name and Config.model_fields[name].default is not None):  # only an optional section is one decision
            nearest = None if rows else find_nearest_field(name, Config)
            fix = f"did you mean {nearest}?" if nearest else "name fields, such as rollout.max_new_tokens"
            raise UserError(_ALLOW, name, "is not a field of the configuration", fix)
        if rows[0].may_change is NEVER:
            raise UserError(_ALLOW, name, f"cannot change: {rows[0].reason.rstrip('.')}", "start a new run")


def describe_change(field: str, before: object, after: object) -> dict[str, Any]:
    """Return the entry of run.json for a change."""
    return {"field": field, "before": before, "after": after, "moves": row.reason if (row := find_change(field)) else ""}


def find_run_to_resume(config: Config) -> ResumedRun | None:
    """Return the run to resume, or None for a new run. Raise UserError if a setting has changed that must not. Models and problems are not
    compared here (`check_problems`, `training.resume`)."""
    resume = config.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        folder = config.log.dir / "latest"
        if not os.path.isfile(folder / "run.json") or not checkpoints.list_newest_first(folder):
            return None
        if read_run(folder, field="checkpoint.resume")["status"] == "finished":
            return None
    else:
        folder = Path(resume)
        if not checkpoints.list_newest_first(folder):
            fix = "give the folder of a run that wrote a checkpoint, or use auto"
            raise UserError("checkpoint.resume", resume, "has no checkpoints/step_NNNNN", fix)
    folder = folder.resolve()
    check_written_files(folder)
    saved, facts = _saved_config(folder), read_run(folder, field="checkpoint.resume")
    config = _keep_names(config, saved, Path(facts.get("cwd", "")))
    run = ResumedRun(folder, config, _find_changes(config, saved), facts.get("models") or {})
    _check_changes(run, saved)
    return run


def _saved_config(run: Path) -> Config:
    """Return the configuration of a run. Fields that did not exist yet get their defaults."""
    try:
        saved = read_run(run, field="checkpoint.resume").get("config") or {}
        saved.get("train", {}).pop("distributed_optimizer", None)  # old runs have it; it only placed Adam's state
        return Config.model_validate_json(json.dumps(saved))
    except READ_ERRORS:  # ValidationError is a ValueError
        rule = "has a configuration that this version of megatron-rl does not support"
        raise UserError("checkpoint.resume", str(run), rule, "resume with the version that wrote it, or start a new run") from None


def _keep_names(config: Config, saved: Config, cwd: Path) -> Config:
    """Return `config` with the saved names of data sets whose files have moved, because their order is drawn from their names. `cwd`: the
    working directory of the run."""
    names = {}
    for field in ("train", "eval"):
        new, old = getattr(config.data, field), getattr(saved.data, field)
        if len(new) == len(old) and not is_named(f"data.{field}.source", config.checkpoint.allow_changes):
            labels = [other.label_in(cwd) for other in old]
            names[field] = [one.name or (label if one.label != label else "") for one, label in zip(new, labels, strict=True)]
    return with_names(config, names)


def with_names(config: Config, names: Mapping[str, Sequence[str]]) -> Config:
    """Return `config` with other names of its data sets, by field of `data`."""
    sets = {
        field: tuple(one.model_copy(update={"name": name}) if name != one.name else one for one, name in pairs)
        for field, pairs in ((field, zip(getattr(config.data, field), given, strict=True)) for field, given in names.items())
    }
    return config.model_copy(update={"data": config.data.model_copy(update=sets)})


def _find_changes(config: Config, saved: Config) -> dict[str, tuple[Any, Any]]:
    """Return the values before and after of all fields that differ. `train.decay_steps` is the step that it implies if both runs decay."""
    before, after = (flatten(each.model_dump(mode="json")) for each in (saved, config))
    if "constant" not in (saved.train.decay_style, config.train.decay_style):
        before["train.decay_steps"], after["train.decay_steps"] = _find_decay(saved), _find_decay(config)
    return {name: (before.get(name), after.get(name)) for name in {**after, **before} if before.get(name) != after.get(name)}


def _find_decay(config: Config) -> int | tuple[int, int]:
    """Return the optimizer step at which the decay of the learning rate ends; with a critic, also that of the critic."""
    steps = config.train.decay_over(config.optimizer_steps).decay_steps
    return (steps, config.critic_train.decay_steps) if config.algorithm.has_critic else steps


def _check_changes(run: ResumedRun, saved: Config) -> None:
    config, never = run.config, "start a new run with checkpoint.resume=never"
    if config.algorithm.has_critic != saved.algorithm.has_critic:
        raise run.refuse("algorithm.advantage", "the checkpoint has a critic or not", never)
    if (config.train.mtp_loss_scaling_factor > 0) != (saved.train.mtp_loss_scaling_factor > 0):
        raise run.refuse("train.mtp_loss_scaling_factor", "the checkpoint has trained MTP layers or not", never)
    for name, (before, after) in run.changes.items():
        kind, row = _may_change(name), find_change(name)
        if kind is NEVER:
            raise run.refuse(name, row.reason.rstrip(".") if row else "", f"restore the old value, or {never}")
        is_new = None in (before, after) and name in ("critic.path", "teacher.path")  # there is nothing to compare with
        if (kind is NAMED or is_new) and not run.is_named(name):
            if name == "train.decay_steps" and config.train.decay_steps == saved.train.decay_steps:
                raise _refuse_stretched_decay(run, before, after)
            raise run.refuse(name)


def _refuse_stretched_decay(run: ResumedRun, before: Any, after: Any) -> UserError:
    train = run.config.train
    rule = f"moves the end of the learning rate's {train.decay_style} decay from optimizer step {before} to {after}"
    ends = before if isinstance(before, tuple) else (before,)
    fix = f"set train.decay_steps = {ends[0]} to keep it (the rate then stays at {train.min_learning_rate:g}), or allow the change: "
    if len(set(ends)) > 1:  # one field cannot keep two ends
        fix = f"set train.decay_steps = {ends[0]}, where the critic's decay then ends, too, and allow the change: "
    name = next((name for name in ("train.steps", "algorithm.updates_per_step") if name in run.changes), "critic.critic_warmup")
    return UserError(name, run.changes[name][1], rule, f"{fix}{_ALLOW} = {_add(run.config, 'train.decay_steps')}")


def _may_change(name: str) -> Any:
    return row.may_change if (row := find_change(name)) else NAMED


def _add(config: Config, field: str) -> str:
    """Return `checkpoint.allow_changes` with `field`, as TOML."""
    field = ".".join(part for part in field.split(".") if not part.isdigit())
    return json.dumps([*config.checkpoint.allow_changes, field])


def _read_state(folder: Path) -> Mapping[str, Any]:
    try:
        return checkpoints.read_state_file(folder)
    except READ_ERRORS:
        return {}  # a damaged checkpoint, which is reported when all are checked
