"""The check of the GPU packages, as far as it goes without them: it knows all kernels, and refuses what it cannot use."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest
from support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import hopper_kernels

CHECKS = str(ROOT / "tools")


def test_every_triton_kernel_has_a_limit_of_registers():
    """Also launch a new one in `hopper_kernels.launch_all`, and run tools/gpu_packages.sh for its figure."""
    assert hopper_kernels.find_kernels() == set(hopper_kernels.REGISTERS)


def test_a_kernel_is_found_whatever_it_and_its_file_are_called(tmp_path):
    (tmp_path / "parallel" / "ops").mkdir(parents=True)
    source = "@triton.jit\ndef part(x): ...\nif True:\n    @triton.jit(debug=1)\n    def _launched(x): part(x)\n"
    (tmp_path / "parallel" / "ops" / "sums.py").write_text(source)
    assert hopper_kernels.find_kernels(tmp_path) == {"_launched"}


@pytest.mark.skipif(any(distributions(name="triton")), reason="the GPU packages are installed")
def test_a_check_that_fails_is_named():
    script, environment = [sys.executable, f"{CHECKS}/gpu_packages.py"], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*script, "triton-kernels"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'triton'" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("failed: triton-kernels\n")


def test_wrong_names_are_refused():
    for command in ([sys.executable, f"{CHECKS}/gpu_packages.py"], ["bash", f"{CHECKS}/gpu_packages.sh"]):
        done = subprocess.run([*command, "--no-such"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == 2 and "--no-such" in done.stderr


def test_an_extension_of_another_python_is_refused_before_anything_is_installed(tmp_path):
    (other := tmp_path / "transformer_engine_torch.cpython-310-x86_64-linux-gnu.so").touch()
    for extension, told in ((other, "set PYTHON"), (tmp_path / "none.so", "no such file")):
        command = ["bash", f"{CHECKS}/gpu_packages.sh", f"--venv={tmp_path}/venv", f"--extension={extension}"]
        done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
        assert done.returncode == 2 and told in done.stderr and not (tmp_path / "venv").exists()
