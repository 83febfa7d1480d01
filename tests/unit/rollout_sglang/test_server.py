"""The engine's process before it imports SGLang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main as command_line
from megatron_rl.versions import put_programs_on_path
from rollout_sglang import server
from rollout_sglang.hooks import registry
from rollout_sglang.platform import stub_modules

FOLDER = str(Path(sys.executable).parent)


@pytest.fixture
def not_activated(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@pytest.fixture
def unchanged_process():
    handler, mask = signal.getsignal(signal.SIGUSR1), os.umask(0)
    yield
    signal.signal(signal.SIGUSR1, handler)
    os.umask(mask)


def test_programs_beside_the_interpreter_are_found_without_activation(not_activated, monkeypatch):
    assert shutil.which("pytest") is None
    monkeypatch.setattr(command_line, "app", lambda prog_name: None)
    command_line.main()
    assert shutil.which("pytest") == f"{FOLDER}/pytest"
    put_programs_on_path()
    assert os.environ["PATH"] == f"{FOLDER}:/usr/bin:/bin"


@pytest.mark.usefixtures("unchanged_process")
def test_an_engine_finds_programs_and_no_megatron_before_it_imports_sglang(not_activated, monkeypatch):
    """An engine started by another node's launcher does not have this environment."""
    steps = []
    monkeypatch.setattr(stub_modules, "block_megatron", lambda: steps.append("blocked"))
    monkeypatch.setattr(registry, "verify", lambda: sys.exit(os.environ["PATH"]))
    with pytest.raises(SystemExit, match=f"^{FOLDER}:"):
        server.main(["--parent", "0"])
    assert steps == ["blocked"]


def test_a_blocked_megatron_is_a_missing_one(tmp_path):
    """This also holds in a child that multiprocessing spawns, which imports the main module under another name."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise FileNotFoundError('libtransformer_engine.so')")
    script = "import runpy; runpy.run_module('rollout_sglang.server', run_name='__mp_main__')\ntry:\n import megatron.core\n"
    script += "except ModuleNotFoundError as error:\n print(error.name)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("megatron"), done.stderr
