"""The pretended Hopper GPU: compiled libraries load without a driver, and torch reports one GPU."""

from __future__ import annotations

import os
import subprocess
import sys

from support.processes import ROOT

from megatron_rl.rehearsal import hopper

USER = "extern int cuInit(unsigned); extern int cublasCreate_v2(void *); int use(void) { return cuInit(0) + cublasCreate_v2(0); }"
ASK = """
import ctypes, sys
from megatron_rl.rehearsal import hopper
print(ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL).cuInit(0))
count = ctypes.c_int()
ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count))
hopper.pretend(mem_get_info=lambda: (1, 2))
import torch
print(count.value, torch.cuda.get_device_capability("cuda:0"), torch.cuda.get_device_name(), torch.cuda.mem_get_info())
"""


def test_libraries_that_want_a_driver_are_loaded_without_one(tmp_path):
    (tmp_path / "packages").mkdir()
    hopper._compile(tmp_path / "libcuda.so.1", "int cuInit(unsigned flags) { return 0; }")
    user = tmp_path / "packages" / "user.so"
    command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", str(user), "-x", "none", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, input=USER, text=True, check=True)
    (tmp_path / "packages" / "no_library.so").write_text("text")
    assert hopper.find_driver_symbols(tmp_path / "packages") == {"cuInit"}
    variables = hopper.build_stubs(tmp_path / "stubs", tmp_path / "packages")
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ASK, "libcuda.so.1"], env=environment, capture_output=True, text=True)
    assert done.stdout == "100\n1 (9, 0) NVIDIA H100 80GB HBM3 (1, 2)\n", done.stderr
