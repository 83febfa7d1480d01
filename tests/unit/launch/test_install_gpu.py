"""launch/install_gpu.sh says what it would do, and refuses what it cannot; requirements-gpu.txt holds what requirements-gpu.in asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)$", re.MULTILINE)


@pytest.fixture
def clone(tmp_path):
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def install(clone: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(clone / "launch" / "install_gpu.sh"), *arguments]
    return subprocess.run(command, cwd="/", env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def read_pins(*names: str) -> dict[str, str]:
    return {pin: version for name in names for pin, version in PIN.findall((ROOT / "launch" / f"requirements-{name}").read_text())}


def assert_refused(done: subprocess.CompletedProcess[str], reason: str) -> None:
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert reason in done.stderr


def test_check_says_what_would_be_installed_and_changes_nothing(clone, tmp_path):
    toolkit = tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    (toolkit / "bin" / "nvcc").chmod(0o755)
    done = install(clone, "--check", PYTHON=sys.executable, CUDA_HOME=str(toolkit))
    assert done.returncode == 0, done.stderr
    pins = read_pins("common.txt", "gpu.txt")
    assert f"would make {clone}/.venv-gpu with {len(pins)} pinned packages" in done.stdout
    for name in ("torch", "sglang-kernel", "sgl-deep-gemm", "transformer-engine"):
        assert re.search(rf"^  {name} +{re.escape(pins[name])} +not installed$", done.stdout, re.MULTILINE)
    assert f"nvcc: {toolkit}/bin/nvcc, CUDA 13.0" in done.stdout and "state: not installed" in done.stdout
    assert not (clone / ".venv-gpu").exists()


def test_what_is_refused_before_anything_is_installed(clone):
    assert_refused(install(clone, "--dry-run"), "--dry-run: is no option; there is --check")
    assert_refused(install(clone, PYTHON="/bin/false"), "PYTHON = '/bin/false': is not Python 3.11 or 3.12")
    assert_refused(install(clone, PYTHON=sys.executable, CXX="no-such-compiler"), "no C++ compiler")
    assert not (clone / ".venv-gpu").exists()


def test_the_lock_holds_what_is_asked_for():
    asked, locked = read_pins("gpu.in"), read_pins("gpu.txt")
    assert asked and {name: locked[name] for name in asked} == asked
    assert not read_pins("common.txt").keys() & locked.keys(), "a version stands in one place"


def test_one_cuda_everywhere():
    """Toolkit, torch and the container's image: a compiler of another minor version than the libraries' is asking for trouble."""
    locked = read_pins("common.txt", "gpu.txt")
    of_toolkit = [
        name for name in locked if re.fullmatch(r"nvidia-(cuda-(nvcc|nvrtc|runtime|crt|cccl|cupti)|nvjitlink|nvvm)|cuda-bindings", name)
    ]
    assert len(of_toolkit) >= 8 and all(locked[name].startswith("13.0.") for name in of_toolkit)
    assert "FROM nvidia/cuda:13.0." in (ROOT / "docker" / "Dockerfile").read_text()
