"""The pretended Hopper GPU without a driver, and shape functions compared with installed libraries."""

import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest
from support.processes import ROOT

from megatron_rl.rehearsal import hopper, signatures
from megatron_rl.rehearsal.kernels import transformer_engine

DEEP_GEMM = """
def fp8_gemm_nt(a, b, d, c=None, recipe=None, alpha=None): ...
def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None): ...
def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, grouped_layout, c=None, recipe=(1, 1, 128)): ...
def get_mk_alignment_for_contiguous_layout(*args, **kwargs): ...
"""
GEMM = "transformer_engine.pytorch.cpp_extensions.gemm.general_gemm"
GEMM_SOURCE = """
import transformer_engine_torch as tex
def general_gemm(A: tex.Tensor, B, out_dtype=None, accumulate=False, layout="TN", out=None, use_split_accumulator=False, grad=False): ...
"""


@pytest.mark.skipif(any(distributions(name="triton")), reason="the GPU packages are installed")
def test_a_renamed_parameter_is_named_with_its_library_and_function(tmp_path):
    def compare() -> list[str]:
        code = "from megatron_rl.rehearsal import hopper, signatures\nfrom megatron_rl.rehearsal.kernels import deep_gemm\n"
        code += "hopper.pretend()\nprint(*signatures.compare(deep_gemm.STANDS_FOR), sep='\\n')"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (tmp_path / "deep_gemm.py").write_text(DEEP_GEMM)
    assert compare() == [""]
    (tmp_path / "deep_gemm.py").write_text(DEEP_GEMM.replace("ks, grouped_layout", "ks, m_indices").replace("b, d, c=None", "b, c, d"))
    function = "deep_gemm.k_grouped_fp8_gemm_nt_contiguous"
    assert compare() == [
        "deep_gemm.fp8_gemm_nt has its parameter d at place 3, the rehearsal at 2",
        "deep_gemm.fp8_gemm_nt has its parameter c at place 2, the rehearsal at 3",
        f"{function} has no parameter grouped_layout: it has a, b, d, ks, m_indices, c, recipe",
        f"{function} needs a parameter m_indices, which the rehearsal does not know",
    ]


def test_a_function_that_cannot_be_imported_is_read_from_its_file(tmp_path, monkeypatch):
    (file := tmp_path / "transformer_engine" / "pytorch" / "cpp_extensions" / "gemm.py").parent.mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    own = {GEMM: transformer_engine.STANDS_FOR[GEMM]}
    file.write_text(GEMM_SOURCE)
    assert signatures.compare(own) == []
    file.write_text(GEMM_SOURCE.replace("use_split_accumulator", "split"))
    assert [line.partition(":")[0] for line in signatures.compare(own)] == [f"{GEMM} has no parameter use_split_accumulator"]
    file.write_text("")
    (line,) = signatures.compare(own)
    assert line.startswith(f"{GEMM} is not found")


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
