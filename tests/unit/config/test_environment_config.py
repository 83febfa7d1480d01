"""The section `[environment]` of a configuration, and what is refused before a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_random_checkpoint
from megatron_rl.config import Config, load_config
from megatron_rl.errors import UserError
from megatron_rl.preflight import check_run

EXAMPLE = Path(__file__).resolve().parents[3] / "configs" / "calculator.toml"


def example(tmp_path: Path, *overrides: str) -> Config:
    make_random_checkpoint(tmp_path / "model", ArchitectureConfig(num_hidden_layers=1, max_position_embeddings=256), 0)
    return load_config(EXAMPLE, [f"--model.path={tmp_path / 'model'}", *overrides])


def test_the_example_is_valid_and_the_default_is_no_environment(tmp_path):
    config = example(tmp_path)
    check_run(config)
    assert config.environment is not None and config.environment.name == "examples.arithmetic.calculator:Calculator"
    assert Config.model_validate({"model": {"path": "m"}}, strict=False).environment is None


@pytest.mark.parametrize(
    "override, line",
    [
        ("--environment.name=calculater", "environment.name = 'calculater': must be your own as module:attribute"),
        ("--environment.name=json:loads", "environment.name = 'json:loads': its step must be a plain function of [(]self, text[)]"),
        ("--environment.name=support.hostile:Deaf", "its step must be a plain function of [(]self, text[)]: too many positional arguments"),
        ("--environment.max_token=1", "environment.max_token = 1: unknown key; did you mean environment.max_tokens"),
        (
            "--environment.max_tokens=169",
            r"rollout.max_new_tokens = 24: plus data.max_prompt_tokens \(64\) and environment.max_tokens \(169\) exceeds the model's 256",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path, override, line):
    with pytest.raises(UserError, match=line):
        check_run(example(tmp_path, override))
