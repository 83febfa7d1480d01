"""What may change when a run resumes: every field has a rule, docs show it, and changes are refused, compared, or recorded."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support import resume_page
from support.models import make_checkpoint

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.observability.run_folder import read_run
from megatron_rl.observability.run_log import RunLog
from megatron_rl.preflight.resume_rules import CHANGES, is_named
from megatron_rl.preflight.resumed_run import allowed_changes_are_fields, find_run_to_resume, resumed_run_has_the_same_settings
from megatron_rl.preflight.rule import Facts
from megatron_rl.training.resume import find_resume_point, hash_code, hash_models

COSINE, LINEAR = ({"steps": 4, "decay_style": style} for style in ("cosine", "linear"))
WSD = {"steps": 4, "decay_style": "WSD", "wsd_decay_steps": 2}
PPO = {"name": "ppo"}


def test_every_field_has_a_rule_and_the_page_shows_it():
    assert len(CHANGES) > 180 and [field for field, rule in CHANGES.items() if rule is None or not rule.reason.endswith(".")] == []
    assert resume_page.PAGE.read_text() == resume_page.write_page(), "run `python -m support.resume_page` in tests/"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def rows(tmp_path) -> Path:
    file = tmp_path / "first" / "train.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(20)))
    return file


class Runs:
    """A run of four steps over `rows`, to be resumed from step 2."""

    def __init__(self, tmp_path: Path, model: Path, rows: Path) -> None:
        self.folder, self.model, self.rows = tmp_path, model, rows

    def config(self, allow: tuple[str, ...] = (), **sections: dict) -> Config:
        data = {"train": str(self.rows), "columns": {"question": "question", "answer": "answer"}, **sections.pop("data", {})}
        checkpoint = {"resume": "auto", "allow_changes": allow}
        given = {"model": {"path": str(self.model)}, "log": {"dir": str(self.folder / "runs")}, "checkpoint": checkpoint, "data": data}
        return Config.model_validate_json(json.dumps(given | sections))

    def start(self, **sections: dict) -> RunLog:
        config = self.config(**sections)
        log = RunLog.create(self.folder / "runs", config.model_dump(mode="json"), {}, hash_models(config))
        folder = checkpoints.checkpoint_folder(log.dir, 2)
        hidden = checkpoints.unfinished_folder(folder)
        (hidden / "hf").mkdir(parents=True)
        shutil.copy(self.model / "config.json", hidden / "hf")
        data = Facts(config).problems.state_dict()
        files = checkpoints.checksum_files(hidden, ["hf/config.json"])
        checkpoints.write_state(hidden, {"step": 2, "adam_step": 2, "layout": {}, "versions": {}, "files": files, "data": data})
        checkpoints.publish(hidden, folder, 0)
        log.finish("broken", "killed")
        return log

    def resume(self, allow: tuple[str, ...] = (), **sections: dict) -> list[str]:
        """Return the fields that changed. Raise UserError if the run is refused."""
        config = self.config(allow, **sections)
        allowed_changes_are_fields(Facts(config))
        resumed_run_has_the_same_settings(Facts(config))
        run, _ = find_resume_point(config)
        return [each["field"] for each in run.describe_changes()]


@pytest.fixture
def runs(tmp_path, model, rows) -> Runs:
    return Runs(tmp_path, model, rows)


@pytest.mark.parametrize("changed, sections", [
    ("train.micro_batch_tokens train.recompute train.layout.dp",
     {"train": {"micro_batch_tokens": 1024, "recompute": "full", "layout": {"dp": 2}}}),
    ("rollout.sglang.mem_fraction_static rollout.engines placement.kind",
     {"rollout": {"sglang": {"mem_fraction_static": 0.5}, "engines": 2}, "placement": {"kind": "disaggregated"}}),
    ("algorithm.name", {"algorithm": {"name": "dapo", "clip_high": 0.2, "dynamic_sampling_max_rounds": 0, "overlong_share": 0.0}}),
    ("data.max_left_out data.eval_every data.max_prompt_tokens eval.samples",
     {"data": {"max_left_out": 1.0, "eval_every": 1, "max_prompt_tokens": 400}, "eval": {"samples": 4}}),
])  # fmt: skip
def test_what_decides_no_result_may_change(runs, changed, sections):
    runs.start()
    assert set(runs.resume(**sections)) == set(changed.split())


@pytest.mark.parametrize("field, sections", [
    ("rollout.max_new_tokens", {"rollout": {"max_new_tokens": 1024}}),
    ("train.learning_rate", {"train": {"learning_rate": 1e-5}}),
    ("reward.functions", {"reward": {"functions": [{"name": "exact"}, {"name": "format", "pattern": "x"}]}}),
    ("algorithm.loss_settings.tau", {"algorithm": {"loss_settings": {"tau": 1.0}}}),
    ("replay", {"replay": {"prompts_per_step": 2}}),
    ("teacher", {"teacher": {"path": "m"}}),
    ("sync.running", {"sync": {"running": "restart"}}),
    ("data.date", {"data": {"date": "2026-02-02"}}),  # an agent's template may ask for it
])  # fmt: skip
def test_what_decides_results_may_change_if_it_is_named(runs, field, sections):
    runs.start()
    with pytest.raises(
        UserError, match=rf"{field}[\w.]* = .*differs from the resumed run .*; restore the old value, or allow the change: "
    ):
        runs.resume(**sections)
    names = find_run_to_resume(runs.config((field,), **sections)).changes
    assert names and all(is_named(name, (field,)) for name in names if not name.startswith("checkpoint."))


@pytest.mark.parametrize("line, sections", [
    ("train.seed = 1: .*: Sampling and the master weights", {"train": {"seed": 1}}),
    ("precision.mode = 'bf16': .* which has 'fp8_unified'", {"precision": {"mode": "bf16"}}),
    ("lora.rank = 8: .*: The adapters in the checkpoint", {"lora": {"rank": 8}}),
    ("algorithm.advantage = 'gae': .*: the checkpoint has a critic or not; start a new run", {"algorithm": PPO}),
    ("train.mtp_loss_scaling_factor = 0.1: .*: the checkpoint has trained MTP layers", {"train": {"mtp_loss_scaling_factor": 0.1}}),
])  # fmt: skip
def test_what_does_not_fit_the_checkpoint_never_changes(runs, line, sections):
    runs.start()
    with pytest.raises(UserError, match=line):
        runs.resume(("algorithm.advantage", "train.mtp_loss_scaling_factor"), **sections)


@pytest.mark.parametrize("name, line", [
    ("rollout.temprature", "is not a field of the configuration; did you mean rollout.temperature?"),
    ("algorithm", "is not a field of the configuration; name fields, such as rollout.max_new_tokens"),
    ("train.seed", "cannot change: Sampling and the master weights of the reference are drawn from it; start a new run"),
])  # fmt: skip
def test_only_fields_that_can_change_are_named(runs, name, line):
    with pytest.raises(UserError, match=re.escape(line)):
        allowed_changes_are_fields(Facts(runs.config((name,))))


@pytest.mark.parametrize("first, longer, field, end", [
    ({"train": COSINE}, {"train": {**COSINE, "steps": 9}}, "train.steps = 9", "4 to 9"),
    ({"train": COSINE}, {"train": {**COSINE, "steps": 3}}, "train.steps = 3", "4 to 3"),
    ({"train": LINEAR}, {"train": {**LINEAR, "steps": 9}}, "train.steps = 9", "4 to 9"),
    ({"train": WSD}, {"train": {**WSD, "steps": 9}}, "train.steps = 9", "4 to 9"),
    ({"train": COSINE, "algorithm": PPO, "critic": {"critic_warmup": 1}},
     {"train": {**COSINE, "steps": 9}, "algorithm": PPO, "critic": {"critic_warmup": 1}}, "train.steps = 9", r"\(3, 4\) to \(8, 9\)"),
])  # fmt: skip
def test_a_decay_of_the_learning_rate_does_not_move_silently(runs, first, longer, field, end):
    runs.start(**first)
    with pytest.raises(
        UserError, match=rf"^{field}: moves the end of the .* decay from optimizer step {end}; set train.decay_steps = [34][ ,]"
    ):
        runs.resume(**longer)
    assert "train.decay_steps" in runs.resume(("train.decay_steps",), **longer)
    if "critic" in first:  # its decay had another end
        assert "train.decay_steps" in runs.resume(("train.decay_steps",), **{**longer, "train": {**longer["train"], "decay_steps": 3}})
    else:
        kept = {**longer["train"], "decay_steps": 4}
        assert runs.resume(**{**longer, "train": kept}) == ["train.steps"], "the decay ends where it did"
        with pytest.raises(UserError, match=r"train.decay_steps = 6: differs from the resumed run .*, which has 4"):
            runs.resume(**{**longer, "train": {**kept, "decay_steps": 6}})


def test_a_constant_rate_may_run_longer(runs):
    runs.start(train={"steps": 4})
    assert runs.resume(train={"steps": 9}) == ["train.steps"]


def test_files_of_problems_may_move_if_rows_and_order_are_equal(runs, rows, tmp_path):
    runs.start()
    moved = tmp_path / "second" / "other.jsonl"
    moved.parent.mkdir()
    rows.rename(moved)
    runs.rows = moved
    assert runs.resume() == ["data.train.0.source", "data.train.0.name"]
    assert find_run_to_resume(runs.config()).config.data.train[0].label == "first/train", "the order is drawn from its name"
    moved.write_text(moved.read_text().replace("7 + 1", "7+1"))
    with pytest.raises(
        UserError, match=r"data.train.0.source = .*: the problems or their order are others.*allow_changes = ..data.train.so"
    ):
        runs.resume()
    assert runs.resume(("data.train.source",)) == ["data.train.0.source"]


def test_another_working_directory_changes_no_order(runs, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(rows.parent)
    runs.rows = Path(rows.name)
    runs.start()
    monkeypatch.chdir(shutil.copytree(rows.parent, tmp_path / "second"))
    assert runs.resume() == ["data.train.0.name"]
    assert find_run_to_resume(runs.config()).config.data.train[0].label == "first/train"


def test_a_changed_template_is_named(runs, tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text("Q: {question}")
    data = {"prompt_template_file": str(file)}
    runs.start(data=data)
    assert runs.resume(data=data) == []
    file.write_text("Question: {question}")
    with pytest.raises(
        UserError, match="data.prompt_template_file = .*: the file has changed since the checkpoint, so prompts differ; restore"
    ):
        runs.resume(data=data)
    assert runs.resume(("data.prompt_template_file",), data=data) == []


def test_problems_that_differ_are_refused_until_the_field_is_named(runs, rows):
    runs.start()
    with pytest.raises(UserError, match=r"data.seed = 3: .* which has 0: the problems or their order are others"):
        runs.resume(data={"seed": 3})
    with pytest.raises(UserError, match=r"data.prompt_template = "):
        runs.resume(("data.seed",), data={"seed": 3, "prompt_template": "Q: {question}"})
    assert runs.resume(("data.seed", "data.prompt_template"), data={"seed": 3, "prompt_template": "Q: {question}"})
    rows.write_text(rows.read_text().replace("7 + 1", "7+1"))
    for irrelevant in ((), ("data.eval_every",)):
        with pytest.raises(UserError, match=r"data: .* although the fields are equal; restore the files, or allow the change"):
            runs.resume(irrelevant)
    assert runs.resume(("data.train",)) == []


def test_other_problems_are_drawn_from_the_same_position(runs):
    stream = Facts(runs.config()).problems
    stream.next_batch(7)
    other = Facts(runs.config(data={"seed": 3})).problems
    with pytest.raises(UserError, match="was trained on other problems"):
        other.load_state_dict(stream.state_dict())
    other.load_state_dict(stream.state_dict(), may_differ=True)
    assert other.state_dict()["position"] == 7 and other.next_batch(1) == Facts(runs.config(data={"seed": 3})).problems.next_batch(8)[7:]


def test_a_model_may_move_if_its_files_are_equal(runs, tmp_path):
    log = runs.start()
    assert read_run(log.dir)["models"].keys() == {"model.path"}
    runs.model = Path(shutil.copytree(runs.model, tmp_path / "moved"))
    assert runs.resume() == ["model.path"]
    (runs.model / "README.md").write_text("not compared")
    assert runs.resume() == ["model.path"]
    weights = runs.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match=r"model.path = .*/moved.*: its files are others; restore .*allow_changes = ..model.path.."):
        runs.resume()
    assert runs.resume(("model.path",)) == ["model.path"]
    edited = json.loads((runs.model / "config.json").read_text())
    (runs.model / "config.json").write_text(json.dumps({**edited, "num_hidden_layers": 9}))
    with pytest.raises(UserError, match=r"model.path = .*: has another architecture than .*step_00002"):
        runs.resume(("model.path",))


def test_other_files_of_a_model_at_the_same_path_are_seen(runs, tmp_path):
    runs.model = Path(shutil.copytree(runs.model, tmp_path / "model"))
    runs.start()
    (runs.model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model.path = '/.*/model with hash \w+': differs .*: its files are others; .*model.path"):
        runs.resume()
    assert runs.resume(("model.path",)) == ["model.path"]


def test_the_code_of_a_plug_has_a_hash(runs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    hashes = []
    for reward in ("1.0", "2.0"):
        (tmp_path / "rewards_of_this_test.py").write_text(f"def reward(text, problem): return {reward}")
        functions = [{"name": "exact"}, {"name": "rewards_of_this_test:reward"}, {"name": "missing:reward"}]
        hashes.append(hash_code(runs.config(reward={"functions": functions})))
    assert hashes[0].keys() == hashes[1].keys() == {"reward.functions.1.name"} and hashes[0] != hashes[1]


def test_a_run_without_hashes_moves_only_if_it_is_named(runs, tmp_path):
    log = runs.start()
    (log.dir / "run.json").write_text(json.dumps(read_run(log.dir) | {"models": {}}))
    runs.model = Path(shutil.copytree(runs.model, tmp_path / "moved"))
    with pytest.raises(UserError, match="the run has no hashes of its files"):
        runs.resume()
    assert runs.resume(("model.path",)) == ["model.path"]
