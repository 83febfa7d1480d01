"""Checks of `doctor` for known problems of GPU installations that cause late failures or wrong results.

The checks examine a `Machine`, so they can be tested on any machine; `find_pitfalls` examines this one. Versions are read from package
metadata. Only Transformer Engine is imported, in a separate process.
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from megatron_rl.errors import UserError
from megatron_rl.kernels.attention import requirements as attention
from megatron_rl.kernels.blackwell import BLACKWELL, is_blackwell
from megatron_rl.kernels.linear.requirements import MIN_CUDA, find_nvcc, find_triton_problem, parse_version
from megatron_rl.rollout import engine_packages, memory_saver
from megatron_rl.rollout.engine_packages import INSTALL

SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
ENGINE_PINS = ("torch", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python")
LOAD_STATEMENT = "import torch, transformer_engine.pytorch"
_DRIVERS = {12: 525, 13: 580}  # oldest driver for each major CUDA version, according to NVIDIA's release notes
_CORES = {"transformer-engine-cu12": 12, "transformer-engine-cu13": 13}
_MIN_CUDA = ".".join(map(str, MIN_CUDA))


class Pitfall(NamedTuple):
    what: str
    found: str
    fix: str


class Machine(NamedTuple):
    """The facts that the checks examine."""

    versions: Mapping[str, str]  # of all distributions, by normalized name
    cuda: str | None = None  # CUDA version of torch, or None for a CPU build
    driver: str | None = None
    environment: Mapping[str, str] = {}
    engine_pins: Mapping[str, str] = {}  # versions that SGLang requires
    nvcc: str | None = None  # release of the compiler
    ninja: str | None = None  # path of the program
    engine_problem: UserError | None = None  # why an engine with default options cannot start
    attention_problem: str = ""  # why torch cannot compute the trainer's attention
    triton_problem: str = ""  # why Triton cannot compile this project's kernels


def find_pitfalls(cuda: str | None, driver: str | None) -> list[Pitfall]:
    """Return the problems of this machine. `cuda`: CUDA version of torch, or None for a CPU build, which most checks skip."""
    nvcc = read_nvcc_release(find_nvcc()) if cuda else None
    machine = Machine(list_distributions(), cuda, driver, os.environ, read_engine_pins(), nvcc, shutil.which("ninja"))
    if cuda is not None:
        engine = engine_packages.find_problem({}, False, BLACKWELL if is_blackwell() else engine_packages.HOPPER)
        triton, _ = find_triton_problem() or ("", "")
        machine = machine._replace(engine_problem=engine, attention_problem=attention.find_attention_problem(), triton_problem=triton)
    checks = [check_scale_variable, check_transformer_engine_packages]
    if cuda is not None:
        checks += [check_cuda, check_engine_packages, check_attention, check_compilers, check_memory_saver, check_transformer_engine_import]
    return [pitfall for check in checks for pitfall in check(machine)]


def list_distributions() -> dict[str, str]:
    return {canonicalize_name(dist.name): dist.version for dist in importlib.metadata.distributions() if dist.name}


def check_scale_variable(machine: Machine) -> Iterator[Pitfall]:
    """Check the variable that Transformer Engine reads for its own recipe when it is imported. Only "1" selects FP32 scales."""
    value = machine.environment.get(SCALES_VARIABLE)
    if value not in (None, "0"):
        recipe = "selects FP32 scales in Transformer Engine's recipe, but precision.scale_format is pow2 by default"
        fix = "unset it; precision.scale_format selects the scales of this project's back ends, but not of TE's own layers"
        yield Pitfall(SCALES_VARIABLE, f"{value!r} {recipe if value == '1' else 'is neither 0 nor 1'}", fix)


def check_transformer_engine_packages(machine: Machine) -> Iterator[Pitfall]:
    """Check that the three packages from PyPI have the same version and match the CUDA of torch. A source build is a single package."""
    versions, cuda = machine.versions, machine.cuda
    names = [name for name in ("transformer-engine", "transformer-engine-torch", *_CORES) if name in versions]
    cores = [name for name in names if name in _CORES]
    if len({versions[name] for name in names}) > 1:
        listed = ", ".join(f"{name} {versions[name]}" for name in names)
        yield Pitfall("Transformer Engine", f"its packages have different versions: {listed}", INSTALL)
    if cores and "transformer-engine-torch" not in names:
        yield Pitfall("Transformer Engine", "its PyTorch extension, transformer-engine-torch, is not installed", INSTALL)
    wrong = [name for name in cores if cuda is not None and _CORES[name] != parse_version(cuda)[0]]
    if wrong or len(cores) > 1:
        fix = f"pip uninstall {' '.join(wrong or cores)}, then {INSTALL}"
        yield Pitfall("Transformer Engine", f"{', '.join(cores)} installed, torch is built for CUDA {cuda}", fix)


def check_transformer_engine_import(machine: Machine) -> Iterator[Pitfall]:
    """Import Transformer Engine, which is the only way to detect an extension that was built for another torch."""
    if "transformer-engine" not in machine.versions:
        return
    try:
        process = subprocess.run([sys.executable, "-c", LOAD_STATEMENT], capture_output=True, encoding="utf-8", timeout=120, check=False)
    except subprocess.TimeoutExpired:
        yield Pitfall("Transformer Engine", "importing it takes more than 120 s", INSTALL)
        return
    if process.returncode:
        yield explain_import_error(process.stderr, machine.versions.get("torch", "unknown"))


def explain_import_error(stderr: str, torch: str) -> Pitfall:
    """Return the problem that the traceback of an import shows."""
    last = (stderr.strip().splitlines() or ["it failed without a message"])[-1]
    symbol = re.search(r"undefined symbol: (\w+)", last)
    if symbol and symbol[1].startswith("cublas"):
        fix = "unset LD_BIND_NOW, or install a newer nvidia-cublas"
        return Pitfall("Transformer Engine", f"cuBLAS lacks {symbol[1]}, which it refers to", fix)
    if symbol:
        pip = "pip install --no-build-isolation --no-cache-dir --no-deps --force-reinstall transformer-engine-torch"
        found = f"its extension was built for another torch than {torch}: {symbol[0]}"
        return Pitfall("Transformer Engine", found, f"NVTE_PYTORCH_FORCE_BUILD=TRUE {pip}, or {INSTALL}")
    return Pitfall("Transformer Engine", f"cannot be imported: {last}", INSTALL)


def check_cuda(machine: Machine) -> Iterator[Pitfall]:
    """Check the CUDA version of torch, cuBLAS, which another package may have downgraded, and the driver."""
    cuda, driver = machine.cuda or "", machine.driver or ""
    if parse_version(cuda) < MIN_CUDA:
        found = f"torch is built for {cuda}; block-scaled matrix products need {_MIN_CUDA}"
        yield Pitfall("CUDA", found, f"{INSTALL}, or precision.backend = emulated")
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        if name in machine.versions and parse_version(machine.versions[name])[:2] < MIN_CUDA:
            yield Pitfall("cuBLAS", f"{name} {machine.versions[name]} has no block-scaled matrix products", INSTALL)
    oldest = _DRIVERS.get(parse_version(cuda)[0])
    if oldest and parse_version(driver) and parse_version(driver)[0] < oldest:
        yield Pitfall("driver", f"{driver} is too old for CUDA {cuda}", f"install driver {oldest} or newer")


def read_engine_pins() -> dict[str, str]:
    """Return the exact versions of compiled packages that the installed SGLang requires."""
    try:
        return parse_pins(importlib.metadata.requires("sglang") or [])
    except importlib.metadata.PackageNotFoundError:
        return {}


def parse_pins(requirements: Sequence[str]) -> dict[str, str]:
    """Return `{"torch": "2.14.1"}` for `["torch==2.14.1", "numpy", ...]`."""
    matches = (re.match(r"([\w.-]+)(?:\[[^]]*\])?==([\w.]+)", text) for text in requirements if "extra ==" not in text)
    return {canonicalize_name(match[1]): match[2] for match in matches if match and canonicalize_name(match[1]) in ENGINE_PINS}


def check_engine_packages(machine: Machine) -> Iterator[Pitfall]:
    """Check that compiled packages have the versions that SGLang requires, and that only one DeepGEMM is installed."""
    versions = machine.versions
    for name, pin in machine.engine_pins.items():
        if name in versions and versions[name].partition("+")[0] != pin:
            yield Pitfall(name, f"{versions[name]}, and sglang {versions.get('sglang')} requires {pin}", INSTALL)
    if {"sgl-deep-gemm", "deep-gemm"} <= set(versions):
        found = "sgl-deep-gemm and deep-gemm are both installed and have the same import name"
        yield Pitfall("DeepGEMM", found, "pip uninstall both, then install one of them")


def check_attention(machine: Machine) -> Iterator[Pitfall]:
    """Check what the trainer and the engine attend with. Without them, runs would fail at the first forward pass or request."""
    if machine.attention_problem:
        yield Pitfall("trainer's attention", machine.attention_problem, attention.INSTALL_HINT)
    if error := machine.engine_problem:
        yield Pitfall(error.field, error.rule, error.fix)


def check_compilers(machine: Machine) -> Iterator[Pitfall]:
    """Check what compiles kernels: Triton, nvcc for DeepGEMM, on first use, and ninja for SGLang and FlashInfer."""
    if machine.triton_problem:
        yield Pitfall("Triton", f"{machine.triton_problem}, so no trainer can run", INSTALL)
    versions, nvcc = set(machine.versions), machine.nvcc
    if {"sgl-deep-gemm", "deep-gemm"} & versions and (nvcc is None or parse_version(nvcc) < MIN_CUDA):
        missing = "not found, so DeepGEMM cannot compile its kernels in trainer and engine"
        found = f"{nvcc} is older than {_MIN_CUDA}, which DeepGEMM requires" if nvcc else missing
        yield Pitfall("nvcc", found, "install the CUDA toolkit that torch was built for and set CUDA_HOME")
    if {"sglang-kernel", "flashinfer-python"} & versions and not machine.ninja:
        yield Pitfall("ninja", "not found, so SGLang and FlashInfer cannot build their kernels and no engine starts", INSTALL)


def check_memory_saver(machine: Machine) -> Iterator[Pitfall]:
    if "torch-memory-saver" in machine.versions:
        try:
            memory_saver.check(machine.environment, machine.cuda)
        except UserError as error:
            yield Pitfall(error.field, f"{error.value} {error.rule}", error.fix)


def read_nvcc_release(home: str | None) -> str | None:
    """Return the release of the compiler, such as `13.0`. `home`: result of `find_nvcc`, a folder with bin/nvcc or the compiler itself."""
    if home is None:
        return None
    path = Path(home, "bin", "nvcc") if Path(home).is_dir() else Path(home)
    match = re.search(r"release ([\d.]+)", run_command(str(path), "--version") or "")
    return match[1] if match else None


def run_command(*command: str) -> str | None:
    """Return the output of a short command, or None if it fails or is not installed."""
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
