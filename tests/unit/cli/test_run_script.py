"""How a tool's function becomes a command."""

from __future__ import annotations

import sys

import pytest
import typer

from megatron_rl.cli.main import run_script
from megatron_rl.errors import UserError


def with_context(context: typer.Context, steps: int = 1) -> None:
    print(steps, context.args)


def without_context(steps: int = 1) -> None:
    raise UserError("steps", steps, "is wrong", "mend it")


def test_unknown_options_reach_a_function_that_takes_them_and_are_refused_otherwise(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tool", "--steps", "2", "--train.steps=3"])
    with pytest.raises(SystemExit) as done:
        run_script(with_context)
    assert not done.value.code and capsys.readouterr().out == "2 ['--train.steps=3']\n"
    with pytest.raises(SystemExit) as done:
        run_script(without_context)
    assert done.value.code == 2 and "No such option: --train.steps" in capsys.readouterr().err


def test_an_expected_error_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tool", "--steps", "2"])
    with pytest.raises(SystemExit) as done:
        run_script(without_context)
    assert done.value.code == 2 and "steps = 2: is wrong; mend it" in capsys.readouterr().err
