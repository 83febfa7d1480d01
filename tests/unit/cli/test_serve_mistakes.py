"""What the command `serve` refuses before an engine starts."""

import json
import re
import shutil
import socket

import pytest
from support.models import make_bf16_checkpoint
from support.processes import free_port
from typer.testing import CliRunner

from megatron_rl.cli.main import app
from megatron_rl.cli.serve import KEY_VARIABLE
from megatron_rl.rollout.engine import find_engine_launcher


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return make_bf16_checkpoint(tmp_path_factory.mktemp("export"))


def no_model(folder, export):
    return [folder]


def damaged_config(folder, export):
    (folder / "config.json").write_text("{")
    return [folder]


def no_weights(folder, export):
    shutil.copytree(export, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    return [folder]


def no_tokenizer(folder, export):
    shutil.copytree(export, folder, ignore=shutil.ignore_patterns("tokenizer*"), dirs_exist_ok=True)
    return [folder]


def unknown_format(folder, export):
    shutil.copytree(export, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    return [folder]


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


MISTAKES = {
    no_model: r"FOLDER = '.*': holds no config.json",
    damaged_config: r"FOLDER = '.*config.json': is not valid JSON",
    no_weights: r"FOLDER = '.*': ",
    no_tokenizer: r"FOLDER = '.*': holds no usable tokenizer",
    unknown_format: r"config.json quantization_config.quant_method = 'gptq': is not supported",
    "port": r"--port = \d+: cannot be bound on 127.0.0.1 \(Address already in use\)",
    "--host=0.0.0.0": r"rollout.hosts.*: listens on every network interface",
    "--host=203.0.113.5": r"--port = \d+: cannot be bound on 203.0.113.5",
    "--tp=3": r"rollout.tp = 3: ",
    "--rollout.sglang.quantization=fp8": r"rollout.sglang.quantization = 'fp8': is set by precision.mode",
    "--rollout.speed=1": r"rollout.speed = 1: unknown key",
    "key": rf"{KEY_VARIABLE}: must consist of letters, digits",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: getattr(mistake, "__name__", mistake))
def test_a_mistake_is_one_line_before_an_engine_starts(export, tmp_path, monkeypatch, taken_port, mistake):
    def start(self, *_, **__):
        raise AssertionError("an engine starts")

    monkeypatch.setattr(type(find_engine_launcher("sglang")), "serve", start)
    monkeypatch.setenv(KEY_VARIABLE, "two words" if mistake == "key" else "")
    (folder := tmp_path / "model").mkdir()
    words = mistake(folder, export) if callable(mistake) else [export, *([mistake] if mistake.startswith("--") else [])]
    port = taken_port if mistake == "port" else free_port()
    done = CliRunner().invoke(app, ["serve", *map(str, words), "--port", str(port)])
    assert (done.exit_code, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert re.match(f"megatron-rl: {MISTAKES[mistake]}", done.stderr), done.stderr


@pytest.mark.parametrize("words", [[], ["--port=0"], ["--port=70000"], ["--port=x"], ["--tp=0"], ["a", "--tp"]], ids=str)
def test_options_of_wrong_types_are_refused(export, words):
    done = CliRunner().invoke(app, ["serve", *words])
    assert done.exit_code == 2 and "Error: " in done.stderr
