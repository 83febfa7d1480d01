"""The check of the GPU packages, as far as it goes without them: it knows all kernels, and refuses what it cannot use."""

import os
import subprocess
import sys
from importlib.metadata import distributions

import compile_kernels
import pytest
from support.processes import ROOT

CHECKS = str(ROOT / "tools")


def test_a_kernel_is_found_whatever_it_and_its_file_are_called(tmp_path):
    (tmp_path / "parallel" / "ops").mkdir(parents=True)
    source = "@triton.jit\ndef part(x): ...\nif True:\n    @triton.jit(debug=1)\n    def _launched(x): part(x)\n"
    (tmp_path / "parallel" / "ops" / "sums.py").write_text(source)
    assert compile_kernels.find_kernels(tmp_path) == {"_launched"}


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
