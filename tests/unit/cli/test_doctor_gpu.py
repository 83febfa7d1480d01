"""Each known problem of a GPU installation is found, and a correct installation has none."""

from __future__ import annotations

import re
from pathlib import Path

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
    monkeypatch.setattr(doctor_gpu, "check_transformer_engine_import", lambda versions: None)
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


def test_the_scale_variable():
    assert doctor_gpu.check_scale_variable({doctor_gpu.SCALES_VARIABLE: "0"}) is None is doctor_gpu.check_scale_variable({})
    for value, words in (("1", "selects FP32 scales in Transformer Engine's recipe"), ("yes", "'yes' is neither 0 nor 1")):
        pitfall = doctor_gpu.check_scale_variable({doctor_gpu.SCALES_VARIABLE: value})
        assert words in pitfall.found and pitfall.fix.startswith("unset it")


def test_packages_of_transformer_engine_match():
    fit = {"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2", "transformer-engine-cu13": "2.20.2"}
    assert doctor_gpu.check_transformer_engine_packages(fit, "13.0") == []
    (pitfall,) = doctor_gpu.check_transformer_engine_packages(fit | {"transformer-engine-torch": "2.19.0"}, "13.0")
    assert "different versions: transformer-engine 2.20.2, transformer-engine-torch 2.19.0" in pitfall.found
    (pitfall,) = doctor_gpu.check_transformer_engine_packages(fit, "12.9")
    assert pitfall.found == "transformer-engine-cu13 installed, torch is built for CUDA 12.9" and "pip uninstall" in pitfall.fix
    (pitfall,) = doctor_gpu.check_transformer_engine_packages({"transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.2"}, "13.0")
    assert "transformer-engine-torch, is not installed" in pitfall.found
    assert doctor_gpu.check_transformer_engine_packages({"transformer-engine": "2.20.2+abc1234"}, "12.9") == []  # built from source


LOADING = "Traceback (most recent call last):\nImportError: /site/transformer_engine_torch.so: undefined symbol: "


def test_an_extension_built_for_another_torch():
    pitfall = doctor_gpu.explain_import_error(LOADING + "_ZNK3c106SymInt6sym_neERKS0_\n", "2.14.1")
    assert pitfall.found.startswith("its extension was built for another torch than 2.14.1") and "--no-build-isolation" in pitfall.fix
    pitfall = doctor_gpu.explain_import_error(LOADING + "cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13", "2.14.1")
    assert "cuBLAS lacks cublasLtGroupedMatrixLayoutInit_internal" in pitfall.found and "LD_BIND_NOW" in pitfall.fix
    assert doctor_gpu.explain_import_error("", "2.14.1").found == "cannot be imported: it failed without a message"


def test_the_extension_is_loaded(monkeypatch):
    versions = {"transformer-engine": "2.20.2", "torch": "2.14.1"}
    assert doctor_gpu.check_transformer_engine_import({}) is None
    monkeypatch.setattr(doctor_gpu, "LOAD_STATEMENT", "pass")
    assert doctor_gpu.check_transformer_engine_import(versions) is None
    monkeypatch.setattr(doctor_gpu, "LOAD_STATEMENT", "raise ImportError('x.so: undefined symbol: _ZN3c10')")
    assert "another torch" in doctor_gpu.check_transformer_engine_import(versions).found


def test_old_cuda_versions_and_drivers():
    for cuda, old in (("12.8", True), ("11.8", True), ("12.9", False), ("13.0", False)):
        assert (doctor_gpu.check_cuda(cuda) is not None) == old
        assert (doctor_gpu.check_cublas({"nvidia-cublas-cu12": f"{cuda}.4.1"}) is not None) == old
    assert doctor_gpu.check_driver("13.0", "575.57.08").fix == "install driver 580 or newer"
    assert doctor_gpu.check_driver("13.0", "580.65.06") is None and doctor_gpu.check_driver("12.9", "550.1") is None
    assert doctor_gpu.check_driver("13.0", None) is None


def test_packages_that_differ_from_the_engines_pins():
    lines = ["torch==2.14.1", "flashinfer_python[cu13]==0.7.2", "numpy", "torch==1; extra == 'old'", "openai==2.8.0"]
    engine_pins = doctor_gpu.parse_pins(lines)
    assert engine_pins == {"torch": "2.14.1", "flashinfer-python": "0.7.2"}
    versions = {"torch": "2.14.1+cu130", "flashinfer-python": "0.7.1", "sglang": "0.5.23"}
    (pitfall,) = doctor_gpu.check_engine_pins(versions, engine_pins)
    assert pitfall == ("flashinfer-python", "0.7.1, and sglang 0.5.23 requires 0.7.2", doctor_gpu.INSTALL)


def test_the_compiler_of_deep_gemm():
    both = {"sgl-deep-gemm": "0.2.3.post2", "deep-gemm": "2.6.1"}
    assert "the same import name" in doctor_gpu.check_deep_gemm_packages(both).found
    single = {"sgl-deep-gemm": "0.2.3.post2"}
    assert doctor_gpu.check_deep_gemm_packages(single) is doctor_gpu.check_nvcc(single, "13.0") is doctor_gpu.check_nvcc({}, None) is None
    assert doctor_gpu.check_nvcc(single, None).found.startswith("not found")
    assert doctor_gpu.check_nvcc(single, "12.8").found == "12.8 is older than 12.9, which DeepGEMM requires"


def test_ninja_is_needed_to_build_kernels():
    versions = {"sglang-kernel": "0.4.10"}
    assert doctor_gpu.check_ninja(versions, None).found.startswith("not found")
    assert doctor_gpu.check_ninja(versions, "/usr/bin/ninja") is doctor_gpu.check_ninja({"sglang": "0.5.23"}, None) is None


def test_engines_can_release_their_memory():
    versions = {"torch-memory-saver": "0.0.10"}
    assert doctor_gpu.check_memory_saver({}, {}, "13.0") is None
    assert "needs libcudart.so.13" in doctor_gpu.check_memory_saver(versions, {}, "13.0").found
    pitfall = doctor_gpu.check_memory_saver(versions, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "13.0")
    assert pitfall.what == "PYTORCH_CUDA_ALLOC_CONF" and "expandable segments" in pitfall.found and pitfall.fix.startswith("unset it")


def test_the_release_of_the_compiler_is_read(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    assert doctor_gpu.read_nvcc_release(str(tmp_path)) == doctor_gpu.read_nvcc_release(str(nvcc)) == "12.9"
    assert doctor_gpu.read_nvcc_release(None) is None and doctor_gpu.read_nvcc_release(str(tmp_path / "no")) is None
