"""Each known pitfall of a GPU installation is seen, with what to do; a whole installation has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl import pitfalls
from megatron_rl.fp8.backends import needs

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    """What launch/install_gpu.sh installs."""
    found = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "launch" / "requirements-gpu.txt").read_text(), re.MULTILINE))
    return found | {"transformer-engine-torch": found["transformer-engine"]}


@pytest.fixture
def whole(monkeypatch):
    """A machine as launch/install_gpu.sh leaves it."""
    for name in ("LD_BIND_NOW", pitfalls.SCALES_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pitfalls, "installed", pins)
    monkeypatch.setattr(pitfalls, "nvcc_release", lambda home: "13.0")
    monkeypatch.setattr(pitfalls, "transformer_engine_loads", lambda versions: None)


def test_the_pinned_installation_has_none(whole):
    assert pitfalls.pitfalls("13.0", "580.65.06") == []


def test_the_pins_are_those_of_the_engine_and_of_the_back_ends(monkeypatch):
    wanted = pitfalls.engine_pins()
    assert set(wanted) == set(pitfalls._ENGINE_PINS)
    assert {name: pins()[name] for name in wanted} == wanted
    monkeypatch.setattr(needs, "_version", pins().get)
    for packages in needs._PACKAGES.values():
        assert [needs._package(alternatives) for alternatives in packages] == [None] * len(packages)


def test_this_machine_has_nothing_to_fall_into_but_its_environment(monkeypatch):
    monkeypatch.delenv(pitfalls.SCALES_VARIABLE, raising=False)
    monkeypatch.setattr(pitfalls, "installed", lambda: {"torch": "2.13.0", "sglang": "0.5.23"})
    assert pitfalls.pitfalls(None, None) == []


@pytest.mark.parametrize(
    "told, words", [("1", "asks Transformer Engine's recipe for FP32 scales"), ("yes", "'yes' is neither 0 nor 1"), ("0", ""), (None, "")]
)
def test_the_scale_variable(told, words):
    found = pitfalls.scale_variable({} if told is None else {pitfalls.SCALES_VARIABLE: told})
    assert (words in found.found and found.fix.startswith("unset it")) if words else found is None


def test_parts_of_transformer_engine_that_do_not_fit():
    fit = {"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2", "transformer-engine-cu13": "2.20.2"}
    assert pitfalls.transformer_engine_parts(fit, "13.0") == []
    (found,) = pitfalls.transformer_engine_parts(fit | {"transformer-engine-torch": "2.19.0"}, "13.0")
    assert "different versions: transformer-engine 2.20.2, transformer-engine-torch 2.19.0" in found.found
    (found,) = pitfalls.transformer_engine_parts(fit, "12.9")
    assert found.found == "transformer-engine-cu13 installed, torch is built for CUDA 12.9" and "pip uninstall" in found.fix
    (found,) = pitfalls.transformer_engine_parts({"transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.2"}, "13.0")
    assert "without transformer-engine-torch" in found.found
    assert pitfalls.transformer_engine_parts({"transformer-engine": "2.20.2+abc1234"}, "12.9") == []  # built from source


LOADING = "Traceback (most recent call last):\nImportError: /site/transformer_engine_torch.so: undefined symbol: "


def test_an_extension_built_for_another_torch():
    found = pitfalls.load_failure(LOADING + "_ZNK3c106SymInt6sym_neERKS0_\n", "2.14.1")
    assert found.found.startswith("its extension was built for another torch than 2.14.1") and "--no-build-isolation" in found.fix
    found = pitfalls.load_failure(LOADING + "cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13", "2.14.1")
    assert "cuBLAS lacks cublasLtGroupedMatrixLayoutInit_internal" in found.found and "LD_BIND_NOW" in found.fix
    assert pitfalls.load_failure("", "2.14.1").found == "cannot be imported: it ended without a message"


def test_an_extension_is_really_loaded(monkeypatch):
    versions = {"transformer-engine": "2.20.2", "torch": "2.14.1"}
    assert pitfalls.transformer_engine_loads({}) is None
    monkeypatch.setattr(pitfalls, "_LOAD", "pass")
    assert pitfalls.transformer_engine_loads(versions) is None
    monkeypatch.setattr(pitfalls, "_LOAD", "raise ImportError('x.so: undefined symbol: _ZN3c10')")
    assert "another torch" in pitfalls.transformer_engine_loads(versions).found


@pytest.mark.parametrize("cuda, old", [("12.8", True), ("11.8", True), ("12.9", False), ("13.0", False)])
def test_cuda_without_block_scaled_products(cuda, old):
    assert (pitfalls.old_cuda(cuda) is not None) == old
    assert (pitfalls.old_cublas({"nvidia-cublas-cu12": f"{cuda}.4.1"}) is not None) == old


def test_drivers():
    assert pitfalls.old_driver("13.0", "575.57.08").fix == "install driver 580 or newer"
    assert pitfalls.old_driver("13.0", "580.65.06") is None and pitfalls.old_driver("12.9", "550.1") is None
    assert pitfalls.old_driver("13.0", None) is None


def test_packages_that_the_engine_was_not_built_with():
    wanted = pitfalls.pins_of(["torch==2.14.1", "flashinfer_python[cu13]==0.7.2", "numpy", "torch==1; extra == 'old'", "openai==2.8.0"])
    assert wanted == {"torch": "2.14.1", "flashinfer-python": "0.7.2"}
    versions = {"torch": "2.14.1+cu130", "flashinfer-python": "0.7.1", "sglang": "0.5.23"}
    (found,) = pitfalls.foreign_versions(versions, wanted)
    assert found == ("flashinfer-python", "0.7.1, and sglang 0.5.23 asks for 0.7.2", pitfalls.INSTALL)


def test_what_deep_gemm_compiles_with():
    both = {"sgl-deep-gemm": "0.2.3.post2", "deep-gemm": "2.6.1"}
    assert "under the same import name" in pitfalls.two_deep_gemms(both).found
    one = {"sgl-deep-gemm": "0.2.3.post2"}
    assert pitfalls.two_deep_gemms(one) is None and pitfalls.compiler(one, "13.0") is None and pitfalls.compiler({}, None) is None
    assert pitfalls.compiler(one, None).found.startswith("not found")
    assert pitfalls.compiler(one, "12.8").found == "12.8 is older than 12.9, which DeepGEMM refuses"


def test_the_compilers_release_is_read(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    assert pitfalls.nvcc_release(str(tmp_path)) == pitfalls.nvcc_release(str(nvcc)) == "12.9"
    assert pitfalls.nvcc_release(None) is None and pitfalls.nvcc_release(str(tmp_path / "no")) is None


def test_binding_at_once():
    te = {"transformer-engine": "2.20.2"}
    assert (
        pitfalls.binds_at_once(te, {"LD_BIND_NOW": "1"})
        and not pitfalls.binds_at_once(te, {})
        and not pitfalls.binds_at_once({}, {"LD_BIND_NOW": "1"})
    )
