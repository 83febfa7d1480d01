"""The command line: exit codes, one line for each expected error, and a traceback only for bugs."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from megatron_rl import __version__, preflight
from megatron_rl.cli.main import app, run_script
from megatron_rl.errors import RunError, UserError

ROOT = Path(__file__).resolve().parents[3]


def program(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "megatron_rl", *args], capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n')
    return str(file)


@pytest.fixture
def train(monkeypatch, config):
    """Run `train` in this process with a function that replaces the training session."""

    def _train(run_training, *overrides: str):
        session = types.ModuleType("megatron_rl.training.session")
        session.run_session = lambda config, layout: run_training(config)
        monkeypatch.setitem(sys.modules, "megatron_rl.training.session", session)
        monkeypatch.setattr(preflight, "check_run", lambda config: None)
        return CliRunner().invoke(app, ["train", config, *overrides])

    return _train


def test_user_and_usage_errors_exit_with_2(config):
    done = program("train", config, "--train.stepz=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "megatron-rl: train.stepz = 1: unknown key; did you mean train.steps?\n"
    for args in (["train"], ["frobnicate"], ["export", "--checkpoint", "a"], ["report"], ["eval"], ["eval", "CONFIG"]):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 2 and "Error: " in result.output
    assert "--checkpoint" in result.output
    result = CliRunner().invoke(app, ["train", "--train.steps=1", config])
    assert result.exit_code == 2 and "must be the config file" in result.stderr
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    assert CliRunner().invoke(app, ["--version"]).stdout == f"megatron-rl {__version__}\n"


def test_train_says_last_what_it_showed_where_the_report_is_and_what_comes_next(train, tmp_path):
    seen = []

    def run_training(cfg):
        seen.append(cfg)
        (tmp_path / "report.html").write_text("")
        (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
        return tmp_path

    result = train(run_training, "--train.steps", "3", "--data.seed=-5")
    assert result.exit_code == 0
    assert (seen[0].train.steps, seen[0].data.seed) == (3, -5)
    shown, report, following = result.stdout.splitlines()
    assert shown == "result: No held-out accuracy was measured in 3 steps" and report == f"report: {tmp_path}/report.html"
    assert following.startswith("next:   ") and following.endswith(f" report {tmp_path}")


def test_eval_passes_its_options_and_prints_the_results(monkeypatch, config, tmp_path):
    seen = []
    module = types.ModuleType("megatron_rl.cli.evaluate")
    module.EvalRequest = lambda *options: options
    module.evaluate = lambda cfg, request: seen.append((cfg, request)) or tmp_path
    monkeypatch.setitem(sys.modules, "megatron_rl.cli.evaluate", module)
    options = ["--checkpoint", "a", "--samples", "8", "--eval.temperature", "0.5", "--data.seed=3", "--at", "1,8"]
    result = CliRunner().invoke(app, ["eval", config, *options])
    assert result.exit_code == 0, result.output
    assert (seen[0][0].eval.temperature, seen[0][0].eval.samples, seen[0][0].data.seed) == (0.5, 8, 3)
    assert seen[0][1] == (Path("a"), None, "1,8", None)
    assert result.stdout.splitlines() == [f"results: {tmp_path}/eval.json", f"page:    {tmp_path}/eval.html"]
    assert CliRunner().invoke(app, ["eval", config, "--checkpoint", "a", "--greedy", "--eval.samples=4"]).exit_code == 0
    assert (seen[1][0].eval.temperature, seen[1][0].eval.samples) == (0, 1)


@pytest.mark.parametrize("error, code, shown", [
    (RunError("the engine died", log_tail="line 8\nline 9\n"), 3, "line 8\nline 9\nmegatron-rl: the engine died\n"),
    (RunError("the engine died"), 3, "megatron-rl: the engine died\n"),
    (KeyboardInterrupt(), 130, "megatron-rl: interrupted\n"),
    (bug := ZeroDivisionError("a bug"), 1, ""),  # keeps its traceback
])  # fmt: skip
def test_errors_are_printed_after_their_log_tail(train, error, code, shown):
    def run_training(cfg):
        raise error

    result = train(run_training)
    assert (result.exit_code, result.stderr) == (code, shown)
    assert (result.exception is bug) == (error is bug)


def test_other_ranks_wait_and_print_their_rank(train, monkeypatch):
    waits = []
    monkeypatch.setattr("megatron_rl.cli.main.time.sleep", waits.append)

    def run_training(cfg):
        raise UserError("data.train", "x", "does not exist")

    for rank, shown in (("0", "megatron-rl: "), ("3", "megatron-rl [rank 3]: ")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train(run_training).stderr == shown + "data.train = 'x': does not exist\n"
    assert len(waits) == 1 and waits[0] > 0  # rank 0 does not wait


def with_context(context: typer.Context, steps: int = 1) -> None:
    print(steps, context.args)


def without_context(steps: int = 1) -> None:
    raise UserError("steps", steps, "is wrong", "fix it")


@pytest.mark.parametrize("function, option, code, out, err", [
    (with_context, "--train.steps=3", 0, "2 ['--train.steps=3']\n", ""),
    (without_context, "--train.steps=3", 2, "", "No such option: --train.steps"),
    (without_context, "--steps=2", 2, "", "megatron-rl: steps = 2: is wrong; fix it\n"),
])  # fmt: skip
def test_unknown_options_of_a_tool_are_passed_to_its_context_or_refused(monkeypatch, capsys, function, option, code, out, err):
    monkeypatch.setattr(sys, "argv", ["tool", "--steps", "2", option])
    monkeypatch.setattr("megatron_rl.cli.main.keep_streams", lambda: None)  # it would write around `capsys`
    with pytest.raises(SystemExit) as done:
        run_script(function)
    shown = capsys.readouterr()
    assert (done.value.code or 0, shown.out) == (code, out) and err in shown.err
