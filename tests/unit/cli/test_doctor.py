"""Doctor reports what is installed, untested versions, and problems of a GPU installation, and fails if the CPU tier cannot run."""

import re
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli import doctor, doctor_gpu
from megatron_rl.errors import UserError
from megatron_rl.kernels.linear import requirements

ROOT = Path(__file__).resolve().parents[3]


def pins(*names: str) -> dict[str, str]:
    text = "".join((ROOT / "launch" / f"requirements{name}.txt").read_text() for name in names)
    return dict(re.findall(r"^([a-z0-9-]+)==([^+\s]+)", text, re.MULTILINE))


def gpu_pins() -> dict[str, str]:
    """Return the versions that launch/install_gpu.sh installs."""
    versions = pins("-nodeps", "-gpu")
    return versions | {"transformer-engine-torch": versions["transformer-engine"]}


def test_the_pins_match_the_requirements_pyproject_the_engine_and_the_back_ends(monkeypatch):
    cpu, gpu = pins("", "-nodeps"), pins("-nodeps", "-gpu")
    assert {name: cpu[name] for name in doctor.TESTED} == doctor.TESTED
    assert {name: gpu[name] for name in doctor.TESTED} == doctor.TESTED | doctor.GPU_PINNED
    assert set(doctor.NEEDED_PACKAGES) <= set(cpu) & set(gpu)
    (low, high) = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert [(3, minor) for minor in range(int(low), int(high))] == list(doctor.PYTHONS)
    engine_pins = doctor_gpu.read_engine_pins()
    assert set(engine_pins) == set(doctor_gpu.ENGINE_PINS)
    assert {name: gpu_pins()[name] for name in engine_pins} == engine_pins
    monkeypatch.setattr(requirements, "find_version", gpu_pins().get)
    missing = [problem for backend in requirements.BACKENDS for problem, _ in requirements.find_missing(backend)]
    assert not any("is not installed" in problem or "known versions" in problem for problem in missing), missing


def test_this_machine_is_described_and_a_missing_package_is_an_error(monkeypatch):
    console = Console(record=True, width=160)
    doctor.print_diagnosis(console)  # raises nothing, because these tests run in the CPU tier
    text = console.export_text()
    for name in (*doctor.NEEDED_PACKAGES, "Python", "cores", "memory", "GPU", "transformer-engine", "apex", "trainer's FP8 linears"):
        assert f"│ {name} " in text
    assert "The CPU tier can run" in text
    real = doctor.find_version
    monkeypatch.setattr(doctor, "find_version", lambda name: None if name == "sglang" else real(name))
    with pytest.raises(UserError) as caught:
        doctor.print_diagnosis(Console(quiet=True))
    assert str(caught.value) == "doctor: the CPU tier cannot run: sglang (not installed); bash launch/setup.sh"


@pytest.mark.parametrize("package, version, cuda, shown, status, advice", [
    ("sglang", "0.5.99", None, "0.5.99", "warn", "tested with 0.5.23: bash launch/setup.sh"),
    ("torch", "2.13.0+cpu", None, "2.13.0+cpu, CPU build", "ok", ""),  # local build tags are ignored
    ("torch", "2.14.1+cu130", "13.0", "2.14.1+cu130, CUDA 13.0", "ok", "pinned for the GPU tier"),
    ("torch", "2.13.0", "13.0", "2.13.0, CUDA 13.0", "warn", "the pinned version is 2.14.1: bash launch/install_gpu.sh"),
])  # fmt: skip
def test_another_version_is_a_warning(monkeypatch, package, version, cuda, shown, status, advice):
    monkeypatch.setattr(doctor, "find_version", lambda name: version)
    monkeypatch.setattr(doctor, "find_cuda_build", lambda: cuda)
    row = doctor.inspect_package(package)
    assert (row.name, row.found, row.status, row.advice.partition(",")[0]) == (package, shown, status, advice)


def test_apex_and_its_namesake_are_distinguished(monkeypatch, tmp_path):
    spec = ModuleSpec("apex", None, is_package=True)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    for part, status, start in (("optimizers", "ok", "NVIDIA's"), ("models.py", "warn", "PyPI's web toolkit")):
        (tmp_path / status / part).mkdir(parents=True)
        spec.submodule_search_locations = [str(tmp_path / status)]
        assert doctor.inspect_apex().status == status and doctor.inspect_apex().found.startswith(start)


def test_jobs_and_pitfalls_follow_the_machine(monkeypatch):
    def engine() -> str:
        return next(job.found for job in doctor.describe_jobs() if job.name == "engine's kernels")

    monkeypatch.setattr(doctor, "find_gpu", lambda: None)
    assert "CPU device" in engine()
    monkeypatch.setattr(doctor, "find_gpu", lambda: "NVIDIA H200, 141 GB")
    monkeypatch.setattr(doctor, "find_cuda_build", lambda: "13.0")
    assert "CUDA kernels" in engine()
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "warn") in [(fact.name, fact.status) for fact in doctor.inspect_pitfalls()]


def test_the_pinned_installation_and_this_machine_have_no_problems(monkeypatch):
    monkeypatch.delenv(doctor_gpu.SCALES_VARIABLE, raising=False)
    monkeypatch.setattr(doctor_gpu, "read_nvcc_release", lambda home: "13.0")
    monkeypatch.setattr(doctor_gpu, "check_transformer_engine_import", lambda machine: [])
    monkeypatch.setattr(doctor_gpu.memory_saver, "find_cuda_runtime", lambda cuda: Path("/site/libcudart.so.13"))
    monkeypatch.setattr(doctor_gpu.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor_gpu, "list_distributions", gpu_pins)
    monkeypatch.setattr(doctor_gpu, "find_triton_problem", lambda: None)
    monkeypatch.setattr(doctor_gpu.engine_packages, "PACKAGES", {})
    monkeypatch.setattr(doctor_gpu.engine_packages, "has_flash_attention_3", lambda: True)
    assert doctor_gpu.find_pitfalls("13.0", "580.65.06") == []
    monkeypatch.setattr(doctor_gpu.engine_packages, "has_flash_attention_3", lambda: False)
    (lacks,) = doctor_gpu.find_pitfalls("13.0", "580.65.06")
    assert (lacks.what, lacks.found[:40]) == ("rollout.sglang.attention_backend", "is not set, and the installed sglang-ker")
    monkeypatch.setattr(doctor_gpu, "is_blackwell", lambda: True)
    assert doctor_gpu.find_pitfalls("13.0", "580.65.06") == []
    monkeypatch.setattr(doctor_gpu, "list_distributions", lambda: {"torch": "2.13.0", "sglang": "0.5.23"})
    assert doctor_gpu.find_pitfalls(None, None) == []


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
        (SUITE | {TORCH_PART: "2.19.0"}, {"cuda": "13.0"}, "Transformer Engine: its packages have different versions: "),
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
    "attention": [
        ({}, {}, ""),
        ({}, {"attention_problem": "varlen_attn of torch 2.10.0 does not accept enable_gqa"}, "trainer's attention: varlen_attn of torch"),
        ({}, {"engine_problem": UserError("rollout.engine", "sglang", "does not start", "install it")}, "rollout.engine: does not start"),
    ],
    "compilers": [
        ({"sglang": "0.5.23"}, {}, ""),
        (DEEP_GEMM | {"sglang-kernel": "0.4.10"}, {"nvcc": "13.0", "ninja": "/usr/bin/ninja"}, ""),
        (DEEP_GEMM, {}, "nvcc: not found"),
        (DEEP_GEMM, {"nvcc": "12.8"}, "nvcc: 12.8 is older than 12.9, which DeepGEMM requires"),
        ({"sglang-kernel": "0.4.10"}, {}, "ninja: not found"),
        (
            {},
            {"triton_problem": "triton 3.5.1 is not a supported version"},
            "Triton: triton 3.5.1 is not a supported version, so no trainer",
        ),
    ],
    "memory_saver": [
        ({}, {"cuda": "13.0"}, ""),
        (SAVER, {"cuda": "14.0"}, "placement.kind: colocated releases an engine's memory with a library that needs libcudart.so.14"),
        (SAVER, {"cuda": "13.0", "environment": EXPANDABLE}, "PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True keeps a colocated engine"),
    ],
}


@pytest.mark.parametrize("check", CASES)
def test_each_problem_is_found(check):
    for versions, facts, problem in CASES[check]:
        pitfalls = list(getattr(doctor_gpu, f"check_{check}")(doctor_gpu.Machine(versions, **facts)))
        assert [f"{pitfall.what}: {pitfall.found}"[: len(problem)] for pitfall in pitfalls] == ([problem] if problem else [])
        assert all(pitfall.fix for pitfall in pitfalls)


def test_pins_and_the_release_of_the_compiler_are_read(tmp_path):
    lines = ["torch==2.14.1", "flashinfer_python[cu13]==0.7.2", "numpy", "torch==1; extra == 'old'", "openai==2.8.0"]
    assert doctor_gpu.parse_pins(lines) == ENGINE_PINS
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    assert doctor_gpu.read_nvcc_release(str(tmp_path)) == doctor_gpu.read_nvcc_release(str(nvcc)) == "12.9"
    assert doctor_gpu.read_nvcc_release(None) is None and doctor_gpu.read_nvcc_release(str(tmp_path / "no")) is None


LOADING = "Traceback (most recent call last):\nImportError: /site/transformer_engine_torch.so: undefined symbol: "


def test_an_extension_built_for_another_torch_is_explained(monkeypatch):
    pitfall = doctor_gpu.explain_import_error(LOADING + "_ZNK3c106SymInt6sym_neERKS0_\n", "2.14.1")
    assert pitfall.found.startswith("its extension was built for another torch than 2.14.1") and "--no-build-isolation" in pitfall.fix
    pitfall = doctor_gpu.explain_import_error(LOADING + "cublasLtGroupedMatrixLayoutInit_internal, version libcublasLt.so.13", "2.14.1")
    assert "cuBLAS lacks cublasLtGroupedMatrixLayoutInit_internal" in pitfall.found and "LD_BIND_NOW" in pitfall.fix
    assert doctor_gpu.explain_import_error("", "2.14.1").found == "cannot be imported: it failed without a message"
    machine = doctor_gpu.Machine({"transformer-engine": "2.20.2", "torch": "2.14.1"})
    assert list(doctor_gpu.check_transformer_engine_import(doctor_gpu.Machine({}))) == []
    monkeypatch.setattr(doctor_gpu, "LOAD_STATEMENT", "pass")
    assert list(doctor_gpu.check_transformer_engine_import(machine)) == []
    monkeypatch.setattr(doctor_gpu, "LOAD_STATEMENT", "raise ImportError('x.so: undefined symbol: _ZN3c10')")
    (pitfall,) = doctor_gpu.check_transformer_engine_import(machine)
    assert "another torch" in pitfall.found
