"""The studies go on where they were: finished runs are read, not made again; and their page shows each of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_rl.config import load_config

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.fixture
def studies(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools" / "studies")


def study(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, check=False)


def run_folder(parent: Path, scores: list[float], *overrides: str, **metrics: float) -> None:
    """A run that is finished, with these overrides of the quickstart and these held-out accuracies."""
    folder = parent / "2026-01-01_00-00-00"
    folder.mkdir(parents=True)
    (parent / "latest").symlink_to(folder.name)
    config = load_config(QUICKSTART, [f"--log.dir={parent}", *overrides]).model_dump(mode="json")
    (folder / "run.json").write_text(json.dumps({"status": "finished", "config": config}))
    rows = [{"step": step, "eval/accuracy": score, "reward/mean": score, **metrics} for step, score in enumerate(scores)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def algorithm_run(parent: Path, name: str, scores: list[float], *more: str) -> None:
    run_folder(parent / name, scores, f"--algorithm.name={name}", f"--train.steps={len(scores) - 1}", *more)


def test_finished_runs_make_a_page_without_training(tmp_path):
    algorithm_run(tmp_path, "grpo", [0.25, 0.75, 0.5], "--train.seed=1")
    algorithm_run(tmp_path, "gspo", [0.25, 0.125, 0.625], "--train.seed=1")
    done = study("studies/algorithms", "--algorithms", "grpo,gspo", "--steps", 2, "--out", tmp_path, "--train.seed=1")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "study.html").read_text()
    assert "<td>grpo</td><td>2</td><td>25.0 %</td><td>75.0 %</td><td>50.0 %</td>" in page
    assert "<td>gspo</td><td>2</td><td>25.0 %</td><td>62.5 %</td><td>62.5 %</td>" in page
    assert page.count("<svg ") == 1 and "--train.seed=1" in page


@pytest.mark.long
def test_a_run_of_another_configuration_is_made_anew(tmp_path):
    """What is asked of the command that trains is seen by its refusal of a model that is not there."""
    algorithm_run(tmp_path, "dapo", [0.5, 0.5])
    (tmp_path / "model").mkdir()
    for change in ("--train.seed=1", "--train.learning_rate=1e-3"):
        options = ("--algorithms", "dapo", "--steps", 1, "--out", tmp_path, change, f"--model.path={tmp_path / 'model'}")
        done = study("studies/algorithms", *options)
        assert done.returncode == 2 and "holds no config.json" in done.stderr


@pytest.mark.long
def test_what_is_not_known_is_refused(tmp_path):
    for tool, option, value in (
        ("algorithms", "--algorithms", "gppo"),
        ("precision", "--modes", "fp4"),
        ("precision", "--modes", "bf16+gspo"),
        ("precision", "--settings", "grpo"),
    ):
        done = study(f"studies/{tool}", option, value, "--out", tmp_path)
        assert done.returncode == 2 and value in done.stderr and not any(tmp_path.iterdir())
    done = study("studies/algorithms", "--config", "absent.toml", "--out", tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "absent.toml" in done.stderr


@pytest.mark.long
def test_the_precision_study_shows_modes_side_by_side(tmp_path):
    """Two seeds each: means of accuracies, their spread, the deepest fall, the falls of the reward, and the mismatch along the answer."""
    scores = {"bf16": ([0.25, 0.5, 0.75], [0.25, 0.75, 0.5]), "fp8_rollout+tis": ([0.25, 0.5, 0.5], [0.25, 0.25, 0.25])}
    answers = {"bf16": [[[32, 0.0], [16, 0.0]]], "fp8_rollout+tis": [[[32, 0.01], [32, 0.03]], [[32, 0.02], [32, 0.05]], [[8, 0.5]]]}
    measured = {"mismatch/abs_mean": 0.5, "mismatch/cause/weights/abs_mean": 0.125, "entropy": 2.0}
    fixed = ("--train.steps=2", "--log.attribute_every=10", "--log.samples=64", "--algorithm.updates_per_step=8")
    for name, correction in (("bf16", "none"), ("fp8_rollout+tis", "tis")):
        for seed, values in enumerate(scores[name]):
            folder = tmp_path / "many_updates" / name / f"seed{seed}"
            mode = (f"--precision.mode={name.removesuffix('+tis')}", f"--algorithm.correction={correction}", f"--train.seed={seed}")
            run_folder(folder, values, *mode, *fixed, f"--model.path={tmp_path / 'model'}", **measured)
            rows = [{"step": 1, "mismatch": answer} for answer in answers[name] if seed == 0]
            (folder / "latest" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--modes", ",".join(scores), "--settings", "many_updates", "--seeds", 2, "--steps", 2, "--jobs", 2, "--out", tmp_path)
    done = study("studies/precision", *arguments)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "study.html").read_text()
    ends = "<td>0.25</td><td>{}</td><td>{}</td><td>2</td><td>2</td>"
    line = "<td>{}</td><td>2</td><td>25.0 %</td><td>{}</td><td>{}</td><td>25.0 %</td><td>{}</td>" + ends + "<td>0.5</td><td>–</td>"
    assert line.format("bf16", "75.0 %", "62.5 %", "25.0 %", "0.625", "0.5") in page
    assert line.format("fp8_rollout+tis", "37.5 %", "37.5 %", "0.0 %", "0.375", "0") in page
    assert "<td>bf16</td><td>–</td><td>–</td><td>0.125</td>" in page
    assert page.count("<svg ") == 5  # by position; accuracy, reward, mismatch, entropy
    # within answers the mismatch grows by 0.02 and 0.03 over 32 positions, and the short answer says nothing of growth
    assert "| bf16 | 1 | 0 (32) | 0 (16) | 0 |" in done.stdout
    assert "| fp8_rollout+tis | 3 | 6.89e-02 ± 7e-02 (72) | 4.00e-02 ± 1e-02 (64) | 7.81e-02 ± 2e-02 |" in done.stdout


def test_growth_along_the_answer_is_told_from_longer_answers_being_worse(studies):
    from by_position import average_by_bin, estimate_slope

    level = [[(32, 0.01)]] * 20 + [[(32, 0.05)] * 8] * 20
    assert estimate_slope(level).value == pytest.approx(0, abs=1e-12)
    assert average_by_bin(level)[0].mean.value < 0.04 < average_by_bin(level)[-1].mean.value, "the bins alone would show growth"
    source = random.Random(0)
    noisy = [[(32, 0.01 + 2e-4 * (32 * place + 16) + source.gauss(0, 0.005)) for place in range(source.randint(4, 16))] for _ in range(50)]
    slope = estimate_slope(noisy)
    assert abs(slope.value - 0.02) < 3 * slope.error < 2e-3
    bins = average_by_bin(noisy)
    assert [(part.start, part.end) for part in bins] == [(64 * place, 64 * place + 64) for place in range(8)]
    assert [part.tokens for part in bins] == sorted((part.tokens for part in bins), reverse=True)
    assert sum(part.tokens for part in bins) == 32 * sum(map(len, noisy))
    assert estimate_slope([[(20, 0.1)]]) is None and average_by_bin([]) == []


def test_the_config_for_pre_trained_weights_asks_for_answers_of_256_tokens():
    config = load_config(ROOT / "tools/studies/real_weights.toml", ["--model.path=model", "--data.train=train.jsonl"])
    assert config.rollout.max_new_tokens >= 256 and config.data.chat and list(config.reward.parts) == ["math", "format"]


def test_scaling_tables_relate_speed_and_sync_to_the_fewest_ranks(tmp_path):
    def row(step: int, trainer: float) -> dict[str, float]:
        parts = {"time/logprobs": trainer / 4, "time/train": 3 * trainer / 4, "time/generate": 1.0, "time/sync": 0.375, "time/proof": 0.125}
        return {**parts, "step": step, "time/step": sum(parts.values())}

    for kind in ("strong", "weak"):
        for count, trainer_seconds in ((1, (7.0, 2.5, 2.0, 99.0)), (2, (7.0, 1.25))):  # a run's first step does not count
            folder = tmp_path / f"{kind}-{count}-0" / "latest"
            folder.mkdir(parents=True)
            rows = [row(step, seconds) for step, seconds in enumerate(trainer_seconds)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = study("studies/training_runs", "scaling", "--read", "--ranks=1,2", "--rounds=1", f"--folder={tmp_path}")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("| 1", "| 2"))]
    assert lines[:2] == [
        "| 1 | 4.00 | 2.50 | 1.00 | 1.00 | 1.00 | 0.500 | 12.5 % | 3.1 % |",
        "| 2 | 2.75 | 1.25 | 2.00 | 1.45 | 1.00 | 0.500 | 18.2 % | 4.5 % |",
    ]
    assert lines[3].split(" | ")[3:5] == ["4.00", "2.91"]


@pytest.mark.long
def test_the_first_steps_of_weights_show_where_masters_lie():
    done = study("studies/first_steps", "weights", "--tensors", 1)
    assert done.returncode == 0, done.stderr
    cells = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if " % | " in line]
    response = {(copy, masters): float(first) for copy, masters, _, first, *_ in cells}
    assert all(0.9 < value < 1.3 for (_, masters), value in response.items() if masters == "spread") and len(response) == 12
    assert response["FP8, power-of-two scales", "stored"] > 20 and response["FP8, from an FP8 checkpoint", "stored"] < 0.05


def test_the_first_steps_of_runs_are_shown_side_by_side(tmp_path):
    model = f"--model.path={tmp_path / 'model'}"
    for masters, response in (("stored", 200.0), ("spread", 1.25)):
        overrides = ("--precision.mode=bf16", f"--precision.masters={masters}", "--train.seed=0", "--train.steps=2", model)
        run_folder(tmp_path / "bf16" / masters / "seed0", [0.0, 0.5, 0.75], *overrides, **{"precision/response": response})
    done = study("studies/first_steps", "runs", "--config", QUICKSTART, "--modes=bf16", "--steps=2", "--out", tmp_path, model)
    assert done.returncode == 0, done.stderr
    assert "| bf16, stored | 0 | 0.5 | 0.75 |" in done.stdout and "| bf16, spread | 1.25 | 1.25 | 1.25 |" in done.stdout
    page = (tmp_path / "study.html").read_text()
    assert "<td>bf16, stored</td><td>200</td>" in page and page.count("<svg ") == 2


def test_the_accuracy_of_runs_is_one_svg_with_a_line_for_each(tmp_path):
    for seed in (0, 1):
        run_folder(tmp_path / str(seed), [0.25, 0.5], f"--train.seed={seed}", **{"accuracy/train": 0.125})
    target, runs = tmp_path / "plot.svg", [tmp_path / str(seed) / "latest" for seed in (0, 1)]
    done = study("studies/plot_runs", target, *runs)
    assert done.returncode == 0, done.stderr
    svg = ElementTree.fromstring(target.read_text())
    texts = {element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert {"held out, seed 0", "held out, seed 1", "training, seed 0", "training, seed 1"} <= texts
    assert "prefers-color-scheme: dark" in target.read_text() and target.stat().st_size < 200_000
    done = study("studies/plot_runs", target, runs[0], runs[0])
    assert done.returncode == 2 and "name runs of different seeds" in done.stderr
