"""tools/compare_runs.py: finished runs are read instead of repeated, and the table and the plot show each of them."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.processes import ROOT, run_tool

from megatron_rl.config import load_config

QUICKSTART = ROOT / "configs" / "quickstart.toml"


def write_run(parent: Path, scores: list[float], *overrides: str, **metrics: float) -> None:
    """Write a finished run with these held-out accuracies."""
    folder = parent / "2026-01-01_00-00-00"
    folder.mkdir(parents=True)
    (parent / "latest").symlink_to(folder.name)
    config = load_config(QUICKSTART, [f"--log.dir={parent}", *overrides]).model_dump(mode="json")
    (folder / "run.json").write_text(json.dumps({"status": "finished", "config": config}))
    rows = [{"step": step, "eval/accuracy": score, "accuracy/train": score, **metrics} for step, score in enumerate(scores)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def runs(tmp_path):
    """Two variants with two seeds each."""
    scores = {"bf16": ([0.25, 0.75, 0.5], [0.25, 0.5, 1.0]), "fp8_rollout": ([0.25, 0.125, 0.5], [0.25, 0.25, 0.25])}
    for mode, by_seed in scores.items():
        for seed, values in enumerate(by_seed):
            overrides = (f"--train.seed={seed}", f"--precision.mode={mode}", "--train.steps=2")
            measured = {"mismatch/abs_mean": 0.5, "mismatch/abs_max": 0.75, "grad_norm": 2.0} if mode == "fp8_rollout" else {}
            write_run(tmp_path / mode / f"seed{seed}", values, *overrides, **measured)
    return tmp_path


def test_finished_runs_are_compared_without_training(runs):
    options = ("--seeds", 2, "--out", runs, "--svg", runs / "plot.svg", "--train.steps=2")
    done = run_tool("compare_runs", QUICKSTART, "--vary", "precision.mode=bf16,fp8_rollout", *options)
    assert done.returncode == 0, done.stderr
    assert "| bf16 | 2 | 25.0 % | 87.5 % | 75.0 % | – | – | – | none |" in done.stdout
    assert "| fp8_rollout | 2 | 25.0 % | 37.5 % | 37.5 % | 0.5 | 0.75 | 2 | none |" in done.stdout
    svg = ElementTree.parse(runs / "plot.svg")
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"held out, bf16, seed 0", "training, fp8_rollout, seed 1"} <= texts
    assert "prefers-color-scheme: dark" in (runs / "plot.svg").read_text()


@pytest.mark.long
def test_a_run_with_another_configuration_is_repeated(runs):
    """The command that trains shows itself by refusing a model folder without a config.json."""
    (runs / "model").mkdir()
    for change in ("--train.steps=3", "--train.learning_rate=1e-3"):
        options = ["--vary=precision.mode=bf16", "--out", runs, "--train.steps=2", change, f"--model.path={runs / 'model'}"]
        done = run_tool("compare_runs", QUICKSTART, *options)
        assert done.returncode == 2 and "contains no config.json" in done.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((QUICKSTART, "--vary=bf16"), "--vary = 'bf16': is not section.key=VALUE,VALUE"),
        ((QUICKSTART, "--vary=algorithm.name=grpo,gppo"), "gppo"),
        (("absent.toml",), "absent.toml"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(tmp_path, arguments, words):
    done = run_tool("compare_runs", *arguments, "--out", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr and not any(tmp_path.iterdir())
