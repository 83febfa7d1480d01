"""Shape functions are compared with installed libraries: here with fake libraries that have other parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest
from support.processes import ROOT

from megatron_rl.rehearsal import signatures
from megatron_rl.rehearsal.kernels import deep_gemm, transformer_engine

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
    def compare() -> tuple[int, list[str]]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
        command = [sys.executable, "-m", "rollout_sglang.rehearsal.signatures"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines()

    (tmp_path / "deep_gemm.py").write_text(DEEP_GEMM)
    assert compare() == (0, [])
    (tmp_path / "deep_gemm.py").write_text(DEEP_GEMM.replace("ks, grouped_layout", "ks, m_indices").replace("b, d, c=None", "b, c, d"))
    function = "deep_gemm.k_grouped_fp8_gemm_nt_contiguous"
    assert compare() == (
        1,
        [
            "deep_gemm.fp8_gemm_nt has its parameter d at place 3, the rehearsal at 2",
            "deep_gemm.fp8_gemm_nt has its parameter c at place 2, the rehearsal at 3",
            f"{function} has no parameter grouped_layout: it has a, b, d, ks, m_indices, c, recipe",
            f"{function} needs a parameter m_indices, which the rehearsal does not know",
        ],
    )


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


def test_where_no_library_is_installed_nothing_is_compared(monkeypatch):
    monkeypatch.setattr(signatures, "LIBRARIES", ("no_such_library",))
    assert signatures.compare_installed([]) is None
    monkeypatch.setattr(signatures, "is_installed", lambda _: False)
    assert signatures.compare(deep_gemm.STANDS_FOR) == []


def test_what_ends_with_an_error_is_a_difference(monkeypatch):
    monkeypatch.setattr(signatures, "is_installed", lambda _: True)
    monkeypatch.setattr(signatures, "_has_driver", lambda: True)
    assert signatures.compare_installed(["/bin/false"]) == ["the installed libraries cannot be compared: "]
