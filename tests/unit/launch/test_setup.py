"""launch/setup.sh refuses an unfit machine in one line before it writes anything, and knows a finished installation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def clone(tmp_path):
    """The files that setup.sh looks at, in a folder whose name holds a space."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def setup(clone: Path, **env: str) -> subprocess.CompletedProcess[str]:
    script = str(clone / "launch" / "setup.sh")
    return subprocess.run(["/bin/bash", script], cwd="/", env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def finish(clone: Path, written_in: Path) -> None:
    """Make `clone` look installed, with the stamp that an installation in `written_in` would have written."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(sys.executable)
    pins = ("launch/requirements-torch.txt", "launch/requirements-common.txt", "launch/requirements.txt")
    files = (*pins, "launch/setup.sh", "launch/common.sh", "pyproject.toml")
    hashes = subprocess.run(["sha256sum", *files], cwd=clone, capture_output=True, text=True, check=True).stdout
    (clone / ".venv" / ".megatron-rl-installed").write_text(f"{hashes}{written_in}\n")


def assert_refused(done: subprocess.CompletedProcess[str], reason: str) -> None:
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert reason in done.stderr


def test_too_small_a_disk(clone):
    assert_refused(setup(clone, PYTHON=sys.executable, MEGATRON_RL_MIN_DISK_MB="999999999"), "an installation asks for 999999999 MB")
    assert not (clone / ".venv").exists()


def test_no_fit_python(clone, tmp_path):
    tools = tmp_path / "tools"  # a PATH without any Python
    tools.mkdir()
    for tool in ("dirname", "sha256sum", "cat", "flock"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")  # one that is there but unfit
    (tools / "python3").chmod(0o755)
    assert_refused(setup(clone, PATH=str(tools), PYTHON=""), "no Python 3.11 or 3.12 with the venv module on PATH")
    assert_refused(setup(clone, PYTHON="/bin/false"), "PYTHON = '/bin/false': is not Python 3.11 or 3.12")
    assert not (clone / ".venv").exists()


def test_a_finished_installation_is_left_alone(clone):
    finish(clone, written_in=clone)
    done = setup(clone, MEGATRON_RL_MIN_DISK_MB="999999999")  # would be refused if it were to install
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("change", ["moved", "new pins", "half done"])
def test_an_installation_that_does_not_fit_is_taken_up_again(clone, tmp_path, change):
    finish(clone, written_in=tmp_path if change == "moved" else clone)
    if change == "new pins":
        (clone / "launch" / "requirements.txt").write_text("rich==1.0\n")
    if change == "half done":
        (clone / ".venv" / ".megatron-rl-installed").unlink()
    assert_refused(setup(clone, PYTHON=sys.executable, MEGATRON_RL_MIN_DISK_MB="999999999"), "an installation asks for")
