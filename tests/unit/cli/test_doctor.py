"""Doctor reports what is installed, warns about untested versions, and fails if the CPU tier cannot run."""

from __future__ import annotations

import re
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli import doctor
from megatron_rl.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def pins(*names: str) -> dict[str, str]:
    text = "".join((ROOT / "launch" / f"requirements{name}.txt").read_text() for name in names)
    return dict(re.findall(r"^([a-z0-9-]+)==([^+\s]+)", text, re.MULTILINE))


def test_versions_match_the_requirements_and_pyproject():
    cpu, gpu = pins("-torch", "-common", ""), pins("-common", "-gpu")
    assert {name: cpu[name] for name in doctor.TESTED} == doctor.TESTED
    assert {name: gpu[name] for name in doctor.TESTED} == doctor.TESTED | doctor.GPU_PINNED
    assert set(doctor.NEEDED_PACKAGES) <= set(cpu) & set(gpu)
    (low, high) = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text()).groups()
    assert [(3, minor) for minor in range(int(low), int(high))] == list(doctor.PYTHONS)


def test_this_machine_is_described(monkeypatch):
    console = Console(record=True, width=160)
    doctor.print_diagnosis(console)  # raises nothing, because these tests run in the CPU tier
    text = console.export_text()
    for name in (*doctor.NEEDED_PACKAGES, "Python", "cores", "memory", "GPU", "transformer-engine", "apex", "trainer's FP8 linears"):
        assert f"│ {name} " in text
    assert "The CPU tier can run" in text


def test_a_missing_package_is_an_error(monkeypatch):
    real = doctor.find_version
    monkeypatch.setattr(doctor, "find_version", lambda name: None if name == "sglang" else real(name))
    with pytest.raises(UserError) as caught:
        doctor.print_diagnosis(Console(quiet=True))
    assert str(caught.value) == "doctor: the CPU tier cannot run: sglang (not installed); bash launch/setup.sh"


@pytest.mark.parametrize(
    "package, version, cuda, shown, status, advice",
    [
        ("sglang", "0.5.99", None, "0.5.99", "warn", "tested with 0.5.23: bash launch/setup.sh"),
        ("torch", "2.13.0+cpu", None, "2.13.0+cpu, CPU build", "ok", ""),  # local build tags are ignored
        ("torch", "2.14.1+cu130", "13.0", "2.14.1+cu130, CUDA 13.0", "ok", "pinned for the GPU tier"),
        ("torch", "2.13.0", "13.0", "2.13.0, CUDA 13.0", "warn", "the pinned version is 2.14.1: bash launch/install_gpu.sh"),
    ],
)
def test_another_version_is_a_warning(monkeypatch, package, version, cuda, shown, status, advice):
    monkeypatch.setattr(doctor, "find_version", lambda name: version)
    monkeypatch.setattr(doctor, "find_cuda_build", lambda: cuda)
    row = doctor.inspect_package(package)
    assert (row.name, row.found, row.status, row.advice.partition(",")[0]) == (package, shown, status, advice)


def test_pitfalls_are_rows(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    assert ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "warn") in [(fact.name, fact.status) for fact in doctor.inspect_pitfalls()]


def test_apex_and_its_namesake_are_distinguished(monkeypatch, tmp_path):
    spec = ModuleSpec("apex", None, is_package=True)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    for part, status, start in (("optimizers", "ok", "NVIDIA's"), ("models.py", "warn", "PyPI's web toolkit")):
        (tmp_path / status / part).mkdir(parents=True)
        spec.submodule_search_locations = [str(tmp_path / status)]
        assert doctor.inspect_apex().status == status and doctor.inspect_apex().found.startswith(start)


def test_the_jobs_follow_the_machine(monkeypatch):
    def engine() -> str:
        return next(job.found for job in doctor.describe_jobs() if job.name == "engine's kernels")

    monkeypatch.setattr(doctor, "find_gpu", lambda: None)
    assert "CPU device" in engine()
    monkeypatch.setattr(doctor, "find_gpu", lambda: "NVIDIA H200, 141 GB")
    monkeypatch.setattr(doctor, "find_cuda_build", lambda: "13.0")
    assert "CUDA kernels" in engine()
