"""The check of the GPU packages, as far as it goes without them: its stand-in for a GPU, and that it knows all kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest
from support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools" / "checks"))
import fake_hopper
import hopper_kernels

CHECKS = str(ROOT / "tools" / "checks")

USER = "extern int cuInit(unsigned); extern int cublasCreate_v2(void *); int use(void) { return cuInit(0) + cublasCreate_v2(0); }"
ASK = """
import ctypes, sys
import fake_hopper
print(ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL).cuInit(0))
count = ctypes.c_int()
ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count))
fake_hopper.pretend()
import torch
print(count.value, torch.cuda.get_device_capability(), torch.cuda.get_device_name())
"""


def test_libraries_that_want_a_driver_are_loaded_without_one(tmp_path):
    (tmp_path / "packages").mkdir()
    fake_hopper._compile(tmp_path / "libcuda.so.1", "int cuInit(unsigned flags) { return 0; }")
    user = tmp_path / "packages" / "user.so"
    command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", str(user), "-x", "none", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, input=USER, text=True, check=True)
    (tmp_path / "packages" / "no_library.so").write_text("text")
    assert fake_hopper.find_driver_symbols(tmp_path / "packages") == {"cuInit"}
    variables = fake_hopper.build_stubs(tmp_path / "stubs", tmp_path / "packages")
    environment = {**os.environ, **variables, "PYTHONPATH": CHECKS}
    done = subprocess.run([sys.executable, "-c", ASK, "libcuda.so.1"], env=environment, capture_output=True, text=True)
    assert done.stdout == "100\n1 (9, 0) NVIDIA H100 80GB HBM3\n", done.stderr


def test_every_triton_kernel_has_a_limit_of_registers():
    """Also launch a new one in `hopper_kernels.launch_all`, and run tools/checks/gpu_packages.sh for its figure."""
    assert hopper_kernels.find_kernels() == set(hopper_kernels.REGISTERS)


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
