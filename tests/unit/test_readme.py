"""The README holds against the code: its size, commands for each machine, own reward and loss, tables, and figures."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from support.families import ENGINE_ARCHITECTURES
from support.processes import one_thread_environment
from support.readme import README, ROOT, read_job, read_train_blocks, write_own_code
from support.shipped import run_module
from support.train_command import TORCHRUN
from typer.main import get_command

from examples.arithmetic.config import DemoConfig
from examples.arithmetic.new_model import make_random_checkpoint
from megatron_rl.algorithm.plug_check import check_algorithm
from megatron_rl.cli.main import app
from megatron_rl.config import load_config
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.reward import RewardConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.types import Problem
from parallel.families import FAMILIES
from parallel.formats import FP8, INT8, MODES
from parallel.model_geometry import ModelGeometry

RUNS = ROOT / "benchmarks" / "h200"
QUICKSTART = ROOT / "configs" / "quickstart.toml"


def test_it_is_short_and_names_all_commands():
    lines = README.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120
    named = re.search(r"More commands: (.*?)\n\n", README, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", named)) | {"train"} == set(get_command(app).commands)
    titles = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert titles.index("Status") < titles.index("Train") < titles.index("Compared with other stacks")


def read_table(title: str) -> list[list[str]]:
    """Return the rows of the first table of a section, its head first."""
    section = README.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    end = next((number for number, (one, other) in enumerate(pairwise(lines), 1) if other.count("|") != one.count("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end] if not line.startswith("|---")]


def test_the_table_of_models_matches_the_code():
    head, *rows = read_table("Models and precision modes")
    assert set(re.findall(r"`(\w+)`", " ".join(head))) == set(MODES)
    families = {re.search(r"`(\w+)`", row[0])[1]: row for row in rows}
    assert set(families) == set(FAMILIES) == set(ENGINE_ARCHITECTURES)  # test_family_engines.py runs every family of the last
    refuses_fp8 = {name for name, row in families.items() if row[1:3] == ["CPU exact, `bf16` only", ""]}
    assert all(row[1] == "CPU exact" for name, row in families.items() if name not in refuses_fp8)
    refuses_int8 = refuses_fp8 | {name for name, row in families.items() if row[2] == "FP8 only"}
    models = {name: ModelGeometry.from_hf_config(ENGINE_ARCHITECTURES[name]) for name in families}
    for format, refusing in ((FP8, refuses_fp8), (INT8, refuses_int8)):
        assert refusing == {name for name, model in models.items() if any(kind.refuse_engine_format(format) for kind in model.attention)}


def test_what_the_table_of_models_calls_rehearsed_and_run_on_a_gpu_was():
    """Rehearsals wrote docs/results/rehearsed.json (support/rehearsed.py). benchmarks/h200/families.json names the reports of GPU runs."""
    rows = {re.search(r"`(\w+)`", row[0])[1]: row for row in read_table("Models and precision modes")[1:]}
    rehearsed = json.loads((ROOT / "docs" / "results" / "rehearsed.json").read_text())["families"]
    assert {name: row[3] for name, row in rows.items() if row[3]} == {name: "yes" for name, job in rehearsed.items() if job["passes"]}
    ran = json.loads((RUNS / "families.json").read_text())
    assert {name: row[4] for name, row in rows.items() if row[4]} == {name: ", ".join(kinds) for name, kinds in ran.items()}
    for report in (report for kinds in ran.values() for reports in kinds.values() for report in reports):
        file, part, *case = report.split(" ", 2)
        checks = json.loads((RUNS / file).read_text())["reports"][part]
        checks = checks.get("checks", checks)
        assert checks and all(checks[name].get("ok", True) is True for name in case or checks), report


def test_the_status_has_the_figures_of_the_runs():
    """The README and docs/guides/gpu.md count the same days, and the mismatch is the largest that a run measured."""
    reports = [json.loads(file.read_text()) for file in sorted(RUNS.glob("20*.json"))]
    days = [report["date"] for report in reports]
    assert set(re.findall(r"\d{4}-\d\d-\d\d", README.split("## Status")[1].split("\n## ")[0])) == set(days)
    assert f"{ {3: 'three'}[len(days)] } times" in README and "on three occasions" in (ROOT / "docs" / "guides" / "gpu.md").read_text()
    steps = [report["reports"].get("D_step", {}) for report in reports]
    cases = [case for step in steps for case in step.get("checks", step).values() if case["ok"]]
    means = [row["mismatch/abs_mean"] for case in cases for row in case["rows"] if "mismatch/abs_mean" in row]
    largest = max(case["largest_dlogp"] for case in cases)
    assert f"(mean {max(means):.2f}, largest {largest:.2f} nats)" in README
    assert all(row["sync/proved"] == row["sync/tensors"] for case in cases for row in case["rows"])


def test_recipes_are_those_of_configs():
    full = (ROOT / "configs" / "README.md").read_text()
    for name, model, machine, precision, _ in read_table("Train")[1:]:
        row = re.search(rf"^\| \[{name}\]\S+ \| (.*) \|$", full, re.MULTILINE)[1].split(" | ")
        assert row[:2] == [model, machine.replace("one H100", "1 H100")]
        assert ("emulated" in row[2]) == ("emulated" in precision) and "fp8" in row[2] and "FP8" in precision


def test_own_reward_and_own_loss_are_called_as_a_run_calls_them(tmp_path, monkeypatch):
    write_own_code(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    problems = [Problem(str(number), "1+1?", "2") for number in range(3)]
    with Scorer(RewardConfig(function="my_reward:score", workers=1), print) as scorer:
        rewards = scorer.score(["it is 2", "3", "two: 2\n"], problems, [3, 1, 3])
    assert [(reward.value, reward.correct, reward.error) for reward in rewards] == [(1.0, True, ""), (0.0, False, ""), (1.0, True, "")]
    check_algorithm(AlgorithmConfig(loss="my_loss:token_losses"))
    (tmp_path / "my_broken_loss.py").write_text((tmp_path / "my_loss.py").read_text().replace(", ratio > 2.0", ""))
    with pytest.raises(UserError, match="my_broken_loss"):
        check_algorithm(AlgorithmConfig(loss="my_broken_loss:token_losses"))


COMMANDS = {machine: commands[-1] for machine, commands in read_train_blocks().items()}
ON_GPUS = ["One GPU", "Eight GPUs", "SLURM"]


def test_each_machine_has_a_block_whose_files_exist():
    assert list(COMMANDS) == ["laptop", *ON_GPUS]
    for commands in read_train_blocks().values():
        for word in " ".join(commands).split():
            assert not word.startswith(("launch/", "tools/", "configs/")) or (ROOT / word).is_file(), word


@pytest.mark.parametrize("machine", ON_GPUS)
def test_a_gpu_command_starts_as_many_ranks_as_its_layout_has(machine, tmp_path):
    config, options, ranks = read_job(COMMANDS[machine], tmp_path)
    layout = load_config(ROOT / config, options).train.layout
    assert layout.tp * layout.cp * layout.pp * layout.dp == ranks


def test_rank_0_of_eight_misses_only_the_gpus(tmp_path):
    """The command's own process, started as torchrun starts it from the folder of the user's code: one line, about the GPU backend."""
    write_own_code(tmp_path)
    config, options, ranks = read_job(COMMANDS["Eight GPUs"], tmp_path)
    launcher = {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "megatron_rl", "train", str(ROOT / config), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **launcher}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("megatron-rl: precision.backend = 'deep_gemm': cannot run here: torch is a CPU build")


def test_ranks_of_torchrun_find_the_users_code_in_the_working_directory(tmp_path):
    """They find the file and miss only the function that it does not have. tests/engine/test_readme_run.py trains with one that it has."""
    write_own_code(tmp_path)
    demo = load_config(QUICKSTART, [], root=DemoConfig, more=ROOT / "examples" / "arithmetic" / "quickstart.toml")
    make_random_checkpoint(tmp_path / "model", demo.architecture, 0)
    options = ["--model.path=model", "--train.layout.tp=2", "--algorithm.loss=my_loss:token_losses", "--reward.function=my_reward:absent"]
    command = [sys.executable, "-m", *map(str, TORCHRUN), "megatron_rl", "train", str(QUICKSTART), *options]
    environment = {**one_thread_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stderr.splitlines() if line.startswith("megatron-rl")]
    assert done.returncode and lines, done.stderr  # torchrun may end one rank before it says so
    assert all("reward.function = 'my_reward:absent'" in line and "module 'my_reward' has no attribute 'absent'" in line for line in lines)


@pytest.mark.parametrize("machine", ON_GPUS)
def test_a_gpu_command_fits_its_machine(machine, tmp_path):
    write_own_code(tmp_path)
    config, options, ranks = read_job(COMMANDS[machine], tmp_path)
    cluster = ["--gpus-per-node", str(min(ranks, 8)), "--json", str(tmp_path / "plan.json")]
    run_module("megatron_rl", "plan", config, *options, *cluster, path=str(tmp_path))
    assert json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("machine", ON_GPUS)
def test_a_gpu_command_is_rehearsed(machine, tmp_path):
    write_own_code(tmp_path)
    config, options, ranks = read_job(COMMANDS[machine], tmp_path)
    cluster = ["--gpus-per-node", str(min(ranks, 8)), "--ranks", "last"]
    assert "run, take the memory" in run_module("megatron_rl", "rehearse", config, *options, *cluster, path=str(tmp_path))
