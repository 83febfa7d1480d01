"""Which run is resumed under which configuration, and what it reports."""

import json
from pathlib import Path

import pytest

import megatron_rl.training.loop  # noqa: F401 - with all that declares metrics
from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.observability.run_folder import read_jsonl, read_metrics, read_run
from megatron_rl.observability.run_log import RunLog
from megatron_rl.preflight.resumed_run import find_run_to_resume
from megatron_rl.training.resume import choose_checkpoint
from megatron_rl.versions import collect_versions


def find_run(given: Config) -> Path | None:
    run = find_run_to_resume(given)
    return run and run.folder


def config(tmp_path: Path, resume: str = "auto", **sections: dict) -> Config:
    given = {"model": {"path": "m"}, "log": {"dir": str(tmp_path / "runs")}, "checkpoint": {"resume": resume}, **sections}
    return Config.model_validate_json(json.dumps(given))


def make_run(tmp_path: Path, steps: tuple[int, ...] = (2,), **sections: dict) -> RunLog:
    log = RunLog.create(tmp_path / "runs", config(tmp_path, **sections).model_dump(mode="json"), collect_versions())
    for step in steps:
        folder = checkpoints.checkpoint_folder(log.dir, step)
        hidden = checkpoints.unfinished_folder(folder)
        (hidden / "mcore").mkdir(parents=True)
        (hidden / "mcore" / ".metadata").touch()
        files = checkpoints.checksum_files(hidden, ["mcore/.metadata"])
        state = {"step": step, "adam_step": step, "layout": {"tp": 1}, "versions": collect_versions(), "files": files}
        checkpoints.write_state(hidden, state)
        checkpoints.publish(hidden, folder, 0)
    return log


def test_auto_resumes_the_newest_run_that_is_not_finished(tmp_path):
    assert find_run(config(tmp_path)) is None, "nothing ran yet"
    log = make_run(tmp_path)
    assert find_run(config(tmp_path)) == log.dir.resolve()
    assert find_run(config(tmp_path, "never")) is None
    log.finish("finished")
    assert find_run(config(tmp_path)) is None
    assert find_run(config(tmp_path, str(log.dir))) == log.dir.resolve(), "a finished run goes on when it is named"
    make_run(tmp_path, steps=()).finish("broken")
    assert find_run(config(tmp_path)) is None, "it broke before its first checkpoint"
    for name in ("nowhere", "runs"):
        with pytest.raises(UserError, match="checkpoint.resume = .*: has no checkpoints/step_NNNNN; give the folder of a run"):
            find_run_to_resume(config(tmp_path, str(tmp_path / name)))


@pytest.mark.parametrize("section, field, value, before", [
    ("train", "learning_rate", 0.5, "1e-06"),
    ("precision", "backend", "deep_gemm", "'emulated'"),
    ("rollout", "temperature", 0.5, "1.0"),
    ("algorithm", "kl_coef", 0.5, "0.0"),
])  # fmt: skip
def test_settings_that_decide_the_numbers_must_not_differ(tmp_path, section, field, value, before):
    make_run(tmp_path)
    with pytest.raises(
        UserError, match=rf"^{section}.{field} = .*{value}.*: differs from the resumed run .*, which has {before}; restore the old value"
    ):
        find_run_to_resume(config(tmp_path, **{section: {field: value}}))


def test_steps_layout_and_places_may_differ_but_not_the_version_of_the_project(tmp_path):
    log = make_run(tmp_path)
    changed = {"train": {"steps": 99, "layout": {"tp": 2}}, "rollout": {"start_timeout": 5.0}, "sync": {"bucket_mb": 3}}
    assert find_run(config(tmp_path, **changed)) == log.dir.resolve()
    run = read_run(log.dir)
    run["config"]["train"]["distributed_optimizer"] = False  # a field that was, and decided no number
    (log.dir / "run.json").write_text(json.dumps(run))
    assert find_run(config(tmp_path, **changed)) == log.dir.resolve()
    run["config"]["train"]["forgotten"] = 1
    (log.dir / "run.json").write_text(json.dumps(run))
    with pytest.raises(UserError, match="has a configuration that this version of megatron-rl does not support"):
        find_run_to_resume(config(tmp_path))


def test_the_newest_whole_checkpoint_is_chosen_and_differences_are_reported(tmp_path):
    log = make_run(tmp_path, steps=(2, 4))
    (log.dir / "checkpoints" / "step_00004" / "state.json").write_text("{")
    checkpoint = choose_checkpoint(log.dir, 9)
    assert checkpoint.describe({"tp": 1}) == [
        "step_00004 is incomplete: state.json cannot be read (JSONDecodeError); the previous checkpoint is used",
        f"resuming from {checkpoint.folder}, step 2",
    ]
    assert checkpoint.describe({"tp": 2})[2].startswith("it was written with another train.layout: ")
    checkpoint.state["versions"]["torch"] = "1.0"
    assert checkpoint.describe({"tp": 1})[2].startswith("it was written with other package versions, so results may differ: torch 1.0 -> ")


def test_a_checkpoint_of_a_version_without_digests_still_loads_and_this_is_said_once(tmp_path):
    state = make_run(tmp_path).dir / "checkpoints" / "step_00002" / "state.json"
    old = json.loads(state.read_text())
    del old["files"]["state.json"]
    state.write_text(json.dumps(old))
    lines = choose_checkpoint(state.parents[2], 9).describe({"tp": 1})
    assert lines[1:] == ["an older version wrote its state.json without a digest, so damage to that file would not be noticed"]


def test_no_whole_checkpoint_or_no_step_left_is_refused(tmp_path):
    log = make_run(tmp_path)
    with pytest.raises(UserError, match="train.steps = 2: .*step_00002 is already at step 2"):
        choose_checkpoint(log.dir, 2)
    (log.dir / "checkpoints" / "step_00002" / "state.json").unlink()
    with pytest.raises(UserError, match="holds no complete checkpoint .step_00002: holds no state.json."):
        choose_checkpoint(log.dir, 9)


def test_the_log_goes_on_after_the_checkpoints_step(tmp_path):
    log = make_run(tmp_path)
    for step in range(4):
        log.write_step({"step": step, "policy_version": step, "reward/mean": 0.5})
        log.write_samples(step, [{"prompt": str(step)}])
    with pytest.raises(UserError, match="is still being written by another process"):
        RunLog.reopen(log.dir, {}, collect_versions(), {}, 2)
    log.record_contents({"data.eval.source": "a"})
    log.finish("broken", "a reason")
    (events,) = (log.dir / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.9999999999.host.1.0"))  # the clock goes back before the run is resumed
    with (log.dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    again = RunLog.reopen(log.dir, {"train": {"steps": 5}, "log": {"trackers": ["tensorboard"]}}, collect_versions(), {}, 2)
    assert again.record_contents({"data.eval.source": "b", "reward.function": "c"}) == {"data.eval.source": ("a", "b")}
    again.record_changes([{"field": "data.eval.source", "before": "a", "after": "b", "moves": "Evaluations."}])
    again.write_step({"step": 3, "policy_version": 3, "reward/mean": 0.25})
    again.finish("finished")
    assert [(row["step"], row["reward/mean"]) for row in read_metrics(log.dir)] == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.25)]
    assert [row["step"] for row in read_jsonl(log.dir / "samples.jsonl")[0]] == [0, 1, 2]
    run = read_run(log.dir)
    assert (run["status"], run["reason"], run["config"]["train"]["steps"]) == ("finished", "", 5)
    assert [(part["step"], [change["field"] for change in part["changes"]]) for part in run["resumed"]] == [(2, ["data.eval.source"])]
    assert "from step 3 on, data.eval.source is 'b' instead of 'a'. Evaluations." in (log.dir / "run.log").read_text()
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(str(log.dir / "tensorboard"))
    assert [(event.step, event.value) for event in events.Reload().Scalars("reward/mean")] == [(0, 0.5), (1, 0.5), (2, 0.5), (3, 0.25)]


def test_a_row_that_was_being_written_as_its_step_was_saved_is_written_again(tmp_path):
    log = make_run(tmp_path)
    for step in range(3):
        log.write_step({"step": step, "policy_version": step, "reward/mean": 0.5})
        log.write_samples(step, [{"prompt": str(step)}])
    log.finish("broken", "a reason")
    again = RunLog.reopen(log.dir, {"train": {"steps": 5}}, collect_versions(), {}, 2, last_row=1)
    again.write_step({"step": 2, "policy_version": 2, "reward/mean": 0.5})
    again.finish("finished")
    assert [row["step"] for row in read_metrics(log.dir)] == [0, 1, 2]
    assert [row["step"] for row in read_jsonl(log.dir / "samples.jsonl")[0]] == [0, 1, 2]
