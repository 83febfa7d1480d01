"""Mistakes of `megatron-rl locate` are one line, and a run's settings are those of its run.json with the overrides."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.cli.main import app
from megatron_rl.cli.run_settings import read_settings
from megatron_rl.config import Config
from megatron_rl.errors import UserError


def write_run(folder, config):
    (folder / "run.json").write_text(json.dumps({"status": "broken", "config": config}))
    return folder


def test_a_run_has_the_settings_of_its_file_and_a_file_has_no_run(tmp_path):
    config = Config.model_validate({"model": {"path": Path("m")}, "precision": {"high": "fp32"}})
    run = write_run(tmp_path, config.model_dump(mode="json"))
    read, source = read_settings(run, ["--train.seed=7"])
    assert source == run and read == config.model_copy(update={"train": config.train.model_copy(update={"seed": 7})})
    (file := tmp_path / "run.toml").write_text('[model]\npath = "m"\n')
    assert read_settings(file, []) == (Config.model_validate({"model": {"path": Path("m")}}), None)


@pytest.mark.parametrize(
    "config, line", [({"model": {}}, "model.path: "), ({"model": {"path": "m"}, "train": {"seeds": 1}}, "train.seeds = 1: unknown")]
)
def test_a_run_that_another_version_wrote_is_refused_by_field(tmp_path, config, line):
    with pytest.raises(UserError, match=line):
        read_settings(write_run(tmp_path, config), [])


def test_mistakes_end_with_2_and_one_line(tmp_path):
    (file := tmp_path / "run.toml").write_text(f'[model]\npath = "{tmp_path}"\n')
    (empty := tmp_path / "empty").mkdir()
    for arguments, line in (
        ([tmp_path / "none.toml"], "CONFIG = "),
        ([empty], "RUN_OR_CONFIG = "),
        ([file, "--json", tmp_path / "none" / "report.json"], "--json = "),
    ):
        done = CliRunner().invoke(app, ["locate", *map(str, arguments)])
        assert done.exit_code == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith(f"megatron-rl: {line}"), done.output
