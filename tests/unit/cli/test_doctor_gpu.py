"""Each known problem of a GPU installation is found, and a correct installation has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.cli import doctor_gpu
from megatron_rl.kernels.linear import requirements

ROOT = Path(__file__).resolve().parents[3]


def pins() -> dict[str, str]:
    """Return the versions that launch/install_gpu.sh installs."""
    text = "".join((ROOT / "launch" / f"requirements-{name}.txt").read_text() for name in ("common", "gpu"))
    versions = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.MULTILINE))
    return versions | {"transformer-engine-torch": versions["transformer-engine"]}


def test_the_pinned_installation_and_this_machine_have_no_problems(monkeypatch):
    monkeypatch.delenv(doctor_gpu.SCALES_VARIABLE, raising=False)
    monkeypatch.setattr(doctor_gpu, "read_nvcc_release", lambda home: "13.0")
    monkeypatch.setattr(doctor_gpu, "check_transformer_engine_import", lambda machine: [])
    monkeypatch.setattr(doctor_gpu.memory_saver, "find_cuda_runtime", lambda cuda: Path("/site/libcudart.so.13"))
    monkeypatch.setattr(doctor_gpu.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor_gpu, "list_distributions", pins)
    assert doctor_gpu.find_pitfalls("13.0", "580.65.06") == []
    monkeypatch.setattr(doctor_gpu, "list_distributions", lambda: {"torch": "2.13.0", "sglang": "0.5.23"})
    assert doctor_gpu.find_pitfalls(None, None) == []


def test_the_pins_match_the_engine_and_the_back_ends(monkeypatch):
    engine_pins = doctor_gpu.read_engine_pins()
    assert set(engine_pins) == set(doctor_gpu.ENGINE_PINS)
    assert {name: pins()[name] for name in engine_pins} == engine_pins
    monkeypatch.setattr(requirements, "find_version", pins().get)
    missing = [problem for backend in requirements.BACKENDS for problem, _ in requirements.find_missing(backend)]
    assert not any("is not installed" in problem or "known versions" in problem for problem in missing), missing


VERSION, TORCH_PART, CU13 = "2.20.2", "transformer-engine-torch", "transformer-engine-cu13"
SUITE = {"transformer-engine": VERSION, TORCH_PART: VERSION, CU13: VERSION}
SAVER, DEEP_GEMM = {"torch-memory-saver": "0.0.10"}, {"sgl-deep-gemm": "0.2.3"}
ENGINE = {"torch": "2.14.1+cu130", "flashinfer-python": "0.7.2", "sglang": "0.5.23"}
ENGINE_PINS = {"torch": "2.14.1", "flashinfer-python": "0.7.2"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SCALES = doctor_gpu.SCALES_VARIABLE
CASES = {
    "scale_variable": [
        ({}, {"environment": {}}, ""),
        ({}, {"environment": {SCALES: "0"}}, ""),
        ({}, {"environment": {SCALES: "1"}}, f"{SCALES}: '1' selects FP32 scales in Transformer Engine's recipe"),
        ({}, {"environment": {SCALES: "yes"}}, f"{SCALES}: 'yes' is neither 0 nor 1"),
    ],
    "transformer_engine_packages": [
        (SUITE, {"cuda": "13.0"}, ""),
        ({"transformer-engine": "2.20.2+abc1234"}, {"cuda": "12.9"}, ""),  # built from source
        (
            SUITE | {TORCH_PART: "2.19.0"},
            {"cuda": "13.0"},
            "Transformer Engine: its packages have different versions: transformer-engine 2",
        ),
        (SUITE, {"cuda": "12.9"}, "Transformer Engine: transformer-engine-cu13 installed, torch is built for CUDA 12.9"),
        ({CU13: VERSION}, {"cuda": "13.0"}, "Transformer Engine: its PyTorch extension, transformer-engine-torch, is not installed"),
    ],
    "cuda": [
        ({"nvidia-cublas-cu12": "12.9.4.1"}, {"cuda": "12.9", "driver": "550.1"}, ""),
        ({}, {"cuda": "13.0", "driver": "580.65.06"}, ""),
        ({}, {"cuda": "13.0"}, ""),
        ({}, {"cuda": "12.8"}, "CUDA: torch is built for 12.8; block-scaled matrix products need 12.9"),
        ({}, {"cuda": "11.8"}, "CUDA: torch is built for 11.8; block-scaled matrix products need 12.9"),
        ({"nvidia-cublas-cu12": "12.8.4.1"}, {"cuda": "12.9"}, "cuBLAS: nvidia-cublas-cu12 12.8.4.1 has no block-scaled"),
        ({}, {"cuda": "13.0", "driver": "575.57.08"}, "driver: 575.57.08 is too old for CUDA 13.0"),
    ],
    "engine_packages": [
        (ENGINE, {"engine_pins": ENGINE_PINS}, ""),
        (ENGINE, {"engine_pins": {"flashinfer-python": "0.7.1"}}, "flashinfer-python: 0.7.2, and sglang 0.5.23 requires 0.7.1"),
        (DEEP_GEMM | {"deep-gemm": "2.6.1"}, {}, "DeepGEMM: sgl-deep-gemm and deep-gemm are both installed and have the same import name"),
    ],
    "compilers": [
        ({"sglang": "0.5.23"}, {}, ""),
        (DEEP_GEMM | {"sglang-kernel": "0.4.10"}, {"nvcc": "13.0", "ninja": "/usr/bin/ninja"}, ""),
        (DEEP_GEMM, {}, "nvcc: not found"),
        (DEEP_GEMM, {"nvcc": "12.8"}, "nvcc: 12.8 is older than 12.9, which DeepGEMM requires"),
        ({"sglang-kernel": "0.4.10"}, {}, "ninja: not found"),
    ],
    "memory_saver": [
        ({}, {"cuda": "13.0"}, ""),
        (SAVER, {"cuda": "13.0"}, "placement.kind: colocated releases an engine's memory with a library that needs libcudart.so.13"),
        (SAVER, {"cuda": "13.0", "environment": EXPANDABLE}, "PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True keeps a colocated engine"),
    ],
}


@pytest.mark.parametrize("check", CASES)
def test_each_problem_is_found(check):
    for versions, facts, problem in CASES[check]:
        pitfalls = list(getattr(doctor_gpu, f"check_{check}")(doctor_gpu.Machine(versions, **facts)))
        assert [f"{pitfall.what}: {pitfall.found}"[: len(problem)] for pitfall in pitfalls] == ([problem] if problem else [])
        assert all(pitfall.fix for pitfall in pitfalls)


def test_pins_are_read_from_requirements():
    lines = ["torch==2.14.1", "flashinfer_python[cu13]==0.7.2", "numpy", "torch==1; extra == 'old'", "openai==2.8.0"]
    assert doctor_gpu.parse_pins(lines) == ENGINE_PINS


LOADING = "Traceback (most recent call last):\nImportError: /site/transformer_engine_torch.so: undefined symbol: "


def test_an_extension_built_for_another_torch():
    pitfall = doctor_gpu.explain_import_error(LOADING + "_ZNK3c106SymInt6sym_neERKS0_\n", "2.14.1")
    assert pitfall.found.startswith("its extension was built for another torch than 2.14.1") and "--no-build-isolation" in pitfall.fix
    pitfall = doctor_gpu.explain_import_error(LOADING + "cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13", "2.14.1")
    assert "cuBLAS lacks cublasLtGroupedMatrixLayoutInit_internal" in pitfall.found and "LD_BIND_NOW" in pitfall.fix
    assert doctor_gpu.explain_import_error("", "2.14.1").found == "cannot be imported: it failed without a message"


def test_the_extension_is_loaded(monkeypatch):
    machine = doctor_gpu.Machine({"transformer-engine": "2.20.2", "torch": "2.14.1"})
    assert list(doctor_gpu.check_transformer_engine_import(doctor_gpu.Machine({}))) == []
    monkeypatch.setattr(doctor_gpu, "LOAD_STATEMENT", "pass")
    assert list(doctor_gpu.check_transformer_engine_import(machine)) == []
    monkeypatch.setattr(doctor_gpu, "LOAD_STATEMENT", "raise ImportError('x.so: undefined symbol: _ZN3c10')")
    (pitfall,) = doctor_gpu.check_transformer_engine_import(machine)
    assert "another torch" in pitfall.found


def test_the_release_of_the_compiler_is_read(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    assert doctor_gpu.read_nvcc_release(str(tmp_path)) == doctor_gpu.read_nvcc_release(str(nvcc)) == "12.9"
    assert doctor_gpu.read_nvcc_release(None) is None and doctor_gpu.read_nvcc_release(str(tmp_path / "no")) is None
