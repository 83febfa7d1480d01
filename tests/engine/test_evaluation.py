"""The command `eval` with real engines: a run's checkpoint against a Hugging Face one, and every figure by the completions."""

import json
from collections import Counter

import pytest
from support.fp8_checkpoints import add_mtp_layer
from support.models import write_model
from support.processes import ROOT, Command
from support.trainer import Trainer

from examples.arithmetic import warm_start
from examples.arithmetic.config import DemoConfig
from examples.arithmetic.task import Arithmetic
from megatron_rl.config import load_config
from megatron_rl.reporting.report import write_report
from parallel.layout import Layout

pytestmark = pytest.mark.timeout(4000)
PROBLEMS, SAMPLES = 32, 4
QUICKSTART = ROOT / "configs" / "quickstart.toml"
TASK = (f"--data.eval_size={PROBLEMS}", "--data.settings.levels=[2, 3]")
SETTINGS = (*TASK, "--eval.temperature=1", "--rollout.max_new_tokens=16", "--rollout.max_running_requests=32")


def make_run(config, folder, step):
    """Make `config.model` and save it as the checkpoint of `step` in the run folder `folder`; return the checkpoint."""
    warm_start.make_model(config)
    trainer = Trainer(config.model.path, config.precision.model_dump(), layout=Layout())
    (folder / "checkpoints").mkdir(parents=True)
    run = {"status": "finished", "reason": "", "started": None, "ended": None, "versions": {}, "config": {}}
    (folder / "run.json").write_text(json.dumps(run))
    return trainer.save(folder / "checkpoints" / f"step_{step:05d}", step)


def evaluate(folder, checkpoint, baseline, results, *options):
    """Return the command's result, eval.json and the completions, which it writes into `results`."""
    sides = "--checkpoint", checkpoint, "--baseline", baseline
    with Command(folder, "megatron_rl", "eval", QUICKSTART, *sides, *options, *SETTINGS) as command:
        done = command.wait(1500)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in (results / "completions.jsonl").read_text().splitlines()]
    return done, json.loads((results / "eval.json").read_text()), rows


@pytest.fixture(scope="module")
def run(new_world, tmp_path_factory):
    """A run folder with the checkpoint of a model that solves some problems."""
    folder = tmp_path_factory.mktemp("evaluated")
    small = ["--architecture.num_hidden_layers=1", "--warm_start.steps=60", *TASK]
    model = ROOT / "examples" / "arithmetic" / "quickstart.toml"
    config = load_config(QUICKSTART, [f"--model.path={folder / 'model'}", *small], root=DemoConfig, more=model)
    new_world().call(make_run, config, folder / "run", 3)
    return folder / "run"


@pytest.fixture(scope="module")
def evaluated(run, checkpoint, tmp_path_factory):
    """The checkpoint against a baseline with random weights."""
    saved, results = (run / folder / "step_00003" for folder in ("checkpoints", "eval"))
    return evaluate(tmp_path_factory.mktemp("eval"), saved, checkpoint, results, "--samples", SAMPLES)


def test_every_problem_has_all_its_completions_of_both_sides(evaluated):
    _, results, rows = evaluated
    assert Counter(row["side"] for row in rows) == {"checkpoint": PROBLEMS * SAMPLES, "baseline": PROBLEMS * SAMPLES}
    assert set(Counter((row["side"], row["problem"]) for row in rows).values()) == {SAMPLES}
    drawn = [problem.id for problem in Arithmetic(0, (2, 3)).held_out(PROBLEMS)]
    for side in results["sides"].values():
        assert sorted(problem["id"] for problem in side["problems"]) == sorted(drawn)
        assert [problem["source"] for problem in side["problems"]] == ["arithmetic"] * PROBLEMS
    assert results["sides"]["checkpoint"]["step"] == 3 and results["sides"]["baseline"]["step"] is None


def test_the_figures_are_those_of_the_completions(evaluated):
    _, results, rows = evaluated
    assert all(row["correct"] == (row["text"].rpartition("#")[2] == row["gold"] and "#" in row["text"]) for row in rows)
    for name, side in results["sides"].items():
        for line in side["table"]:
            selected = [row for row in rows if row["side"] == name and line["level"] in (None, row["level"])]
            by_problem = {}
            for row in selected:
                by_problem.setdefault(row["problem"], []).append(row["correct"])
            assert line["problems"] == len(by_problem)
            assert line["mean"]["value"] == pytest.approx(sum(row["correct"] for row in selected) / len(selected))
            assert line["pass"][str(SAMPLES)]["value"] == pytest.approx(sum(map(any, by_problem.values())) / len(by_problem))
            assert line["maj"]["1"]["value"] == pytest.approx(line["mean"]["value"])
            assert line["mean"]["low"] <= line["mean"]["value"] <= line["mean"]["high"]
            assert line["tokens"]["mean"] == pytest.approx(sum(row["tokens"] for row in selected) / len(selected))
            assert line["truncated"] == pytest.approx(sum(row["finish_reason"] == "length" for row in selected) / len(selected))


def test_a_model_that_learned_something_is_above_random_weights(evaluated):
    done, results, _ = evaluated
    checkpoint, baseline = (results["sides"][name]["table"][0]["mean"]["value"] for name in ("checkpoint", "baseline"))
    overall = results["comparison"][0]
    assert 0 <= baseline < checkpoint < 1
    assert overall["mean"]["value"] == pytest.approx(checkpoint - baseline) and overall["p"] < 0.05
    assert "points above the baseline's" in done.out and "checkpoint - baseline" in done.out


def test_page_and_report_show_it(evaluated, run):
    assert "Against the baseline" in (run / "eval" / "step_00003" / "eval.html").read_text()
    assert "eval/step_00003" in write_report(run).read_text()


@pytest.mark.long
def test_greedy_twice_is_the_same(run, tmp_path):
    """The model is its own baseline, in BF16 mode: greedy responses do not depend on the batch."""
    model, out = run.parent / "model", tmp_path / "out"
    options = "--output", out, "--greedy", "--samples", 1, "--precision.mode=bf16"
    _, results, rows = evaluate(tmp_path / "eval", model, model, out, *options)
    texts = {side: [row["text"] for row in rows if row["side"] == side] for side in ("checkpoint", "baseline")}
    assert len(texts["checkpoint"]) == PROBLEMS and texts["checkpoint"] == texts["baseline"]
    assert results["sampling"]["temperature"] == 0 and results["comparison"][0]["p"] == 1.0
    share = sum(row["correct"] for row in rows) / len(rows)
    assert [side["table"][0]["mean"]["value"] for side in results["sides"].values()] == [share, share]


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "glm_moe_dsa"])
def test_an_engine_samples_the_same_with_and_without_layers_for_multi_token_prediction(family, tmp_path):
    """The layers are stored in FP8, as in exports. SGLang loads the rest of such a model."""
    for name in ("with", "without"):
        write_model(tmp_path / name, family, {"mode": "fp8_unified"})
    add_mtp_layer(tmp_path / "with", "pow2")
    results = tmp_path / "results"
    *_, rows = evaluate(tmp_path, tmp_path / "with", tmp_path / "without", results, "--samples", 1, "--output", results)
    sides = [sorted((row["problem"], row["text"]) for row in rows if row["side"] == side) for side in ("checkpoint", "baseline")]
    assert sides[0] == sides[1] and len(sides[0]) == PROBLEMS
