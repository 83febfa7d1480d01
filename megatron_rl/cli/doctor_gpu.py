"""Checks of `doctor` for known problems of GPU installations that cause late failures or wrong results.

Each check takes what it examines as arguments, so it can be tested on any machine; `find_pitfalls` examines this machine. Versions are read
from package metadata. Only Transformer Engine is imported, in a separate process.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name

from megatron_rl.errors import UserError
from megatron_rl.kernels.linear.requirements import MIN_CUDA, find_nvcc, parse_version
from megatron_rl.rollout import memory_saver

INSTALL = "bash launch/install_gpu.sh"
SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
_DRIVERS = {12: 525, 13: 580}  # oldest driver for each major CUDA version, according to NVIDIA's release notes
ENGINE_PINS = ("torch", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python")
_CORES = {"transformer-engine-cu12": 12, "transformer-engine-cu13": 13}
LOAD_STATEMENT = "import torch, transformer_engine.pytorch"

Versions = Mapping[str, str]  # versions of installed distributions by name


class Pitfall(NamedTuple):
    """A problem, as a row of the table."""

    what: str
    found: str
    fix: str


def find_pitfalls(cuda: str | None, driver: str | None) -> list[Pitfall]:
    """Return the problems of this machine. `cuda`: CUDA version of torch, or None for a CPU build, which most checks skip."""
    versions = list_distributions()
    pitfalls: list[Pitfall | None] = [check_scale_variable(os.environ), *check_transformer_engine_packages(versions, cuda)]
    if cuda is not None:
        pitfalls += [check_cuda(cuda), check_cublas(versions), check_driver(cuda, driver)]
        pitfalls += check_engine_pins(versions, read_engine_pins())
        pitfalls += [check_deep_gemm_packages(versions), check_nvcc(versions, read_nvcc_release(find_nvcc()))]
        pitfalls += [check_ninja(versions, shutil.which("ninja")), check_memory_saver(versions, os.environ, cuda)]
        pitfalls += [check_transformer_engine_import(versions)]
    return [pitfall for pitfall in pitfalls if pitfall is not None]


def list_distributions() -> dict[str, str]:
    """Return the versions of all distributions by normalized name."""
    return {canonicalize_name(dist.name): dist.version for dist in importlib.metadata.distributions() if dist.name}


def check_scale_variable(environment: Mapping[str, str]) -> Pitfall | None:
    """Check the variable that Transformer Engine reads for its own recipe when it is imported. Only "1" selects FP32 scales."""
    value = environment.get(SCALES_VARIABLE)
    if value in (None, "0"):
        return None
    recipe = "selects FP32 scales in Transformer Engine's recipe, but precision.scale_format is pow2 by default"
    fix = "unset it; precision.scale_format selects the scales of this project's back ends, but not of TE's own layers"
    return Pitfall(SCALES_VARIABLE, f"{value!r} {recipe if value == '1' else 'is neither 0 nor 1'}", fix)


def check_transformer_engine_packages(versions: Versions, cuda: str | None) -> list[Pitfall]:
    """Check that the three packages from PyPI have the same version and match the CUDA of torch. A source build is a single package."""
    names = [name for name in ("transformer-engine", "transformer-engine-torch", *_CORES) if name in versions]
    if not names:
        return []
    pitfalls, cores = [], [name for name in names if name in _CORES]
    if len({versions[name] for name in names}) > 1:
        listed = ", ".join(f"{name} {versions[name]}" for name in names)
        pitfalls.append(Pitfall("Transformer Engine", f"its packages have different versions: {listed}", INSTALL))
    if cores and "transformer-engine-torch" not in names:
        pitfalls.append(Pitfall("Transformer Engine", "its PyTorch extension, transformer-engine-torch, is not installed", INSTALL))
    wrong = [name for name in cores if cuda is not None and _CORES[name] != parse_version(cuda)[0]]
    if wrong or len(cores) > 1:
        fix = f"pip uninstall {' '.join(wrong or cores)}, then {INSTALL}"
        pitfalls.append(Pitfall("Transformer Engine", f"{', '.join(cores)} installed, torch is built for CUDA {cuda}", fix))
    return pitfalls


def check_transformer_engine_import(versions: Versions) -> Pitfall | None:
    """Import Transformer Engine, which is the only way to detect an extension that was built for another torch."""
    if "transformer-engine" not in versions:
        return None
    try:
        process = subprocess.run([sys.executable, "-c", LOAD_STATEMENT], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return Pitfall("Transformer Engine", "importing it takes more than 120 s", INSTALL)
    return None if process.returncode == 0 else explain_import_error(process.stderr, versions.get("torch", "unknown"))


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


def check_cuda(cuda: str) -> Pitfall | None:
    if parse_version(cuda) >= MIN_CUDA:
        return None
    found = f"torch is built for {cuda}; block-scaled matrix products need {'.'.join(map(str, MIN_CUDA))}"
    return Pitfall("CUDA", found, f"{INSTALL}, or precision.backend = emulated")


def check_cublas(versions: Versions) -> Pitfall | None:
    """Check the cuBLAS package, which another package may have downgraded."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        if name in versions and parse_version(versions[name])[:2] < MIN_CUDA:
            return Pitfall("cuBLAS", f"{name} {versions[name]} has no block-scaled matrix products", INSTALL)
    return None


def check_driver(cuda: str, driver: str | None) -> Pitfall | None:
    oldest = _DRIVERS.get(parse_version(cuda)[0])
    if driver is None or oldest is None or not parse_version(driver) or parse_version(driver)[0] >= oldest:
        return None
    return Pitfall("driver", f"{driver} is too old for CUDA {cuda}", f"install driver {oldest} or newer")


def read_engine_pins() -> dict[str, str]:
    """Return the exact versions of compiled packages that the installed SGLang requires."""
    try:
        requirements = importlib.metadata.requires("sglang") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return parse_pins(requirements)


def parse_pins(requirements: Sequence[str]) -> dict[str, str]:
    """Return `{"torch": "2.14.1"}` for `["torch==2.14.1", "numpy", ...]`."""
    matches = (re.match(r"([\w.-]+)(?:\[[^]]*\])?==([\w.]+)", text) for text in requirements if "extra ==" not in text)
    return {canonicalize_name(match[1]): match[2] for match in matches if match and canonicalize_name(match[1]) in ENGINE_PINS}


def check_engine_pins(versions: Versions, pins: Mapping[str, str]) -> list[Pitfall]:
    """Return the compiled packages whose version differs from the one that SGLang requires."""
    return [
        Pitfall(name, f"{versions[name]}, and sglang {versions.get('sglang')} requires {pin}", INSTALL)
        for name, pin in pins.items()
        if name in versions and versions[name].partition("+")[0] != pin
    ]


def check_deep_gemm_packages(versions: Versions) -> Pitfall | None:
    """Check that only one of the packages that are imported as `deep_gemm` is installed, because they overwrite each other's files."""
    if "sgl-deep-gemm" not in versions or "deep-gemm" not in versions:
        return None
    fix = "pip uninstall both, then install one of them"
    return Pitfall("DeepGEMM", "sgl-deep-gemm and deep-gemm are both installed and have the same import name", fix)


def check_nvcc(versions: Versions, nvcc: str | None) -> Pitfall | None:
    """Check the compiler of DeepGEMM's kernels, which are compiled on first use. `nvcc`: release of the compiler, or None."""
    if not {"sgl-deep-gemm", "deep-gemm"} & set(versions):
        return None
    fix = "install the CUDA toolkit that torch was built for and set CUDA_HOME"
    if nvcc is None:
        return Pitfall("nvcc", "not found, so DeepGEMM cannot compile its kernels in trainer and engine", fix)
    if parse_version(nvcc) < MIN_CUDA:
        return Pitfall("nvcc", f"{nvcc} is older than {'.'.join(map(str, MIN_CUDA))}, which DeepGEMM requires", fix)
    return None


def check_ninja(versions: Versions, ninja: str | None) -> Pitfall | None:
    """Check that SGLang and FlashInfer find `ninja` on PATH to build kernels. `ninja`: its path, or None."""
    if ninja or not {"sglang-kernel", "flashinfer-python"} & set(versions):
        return None
    return Pitfall("ninja", "not found, so SGLang and FlashInfer cannot build their kernels and no engine starts", INSTALL)


def check_memory_saver(versions: Versions, environment: Mapping[str, str], cuda: str) -> Pitfall | None:
    """Check that colocated engines can release their memory."""
    if "torch-memory-saver" not in versions:
        return None
    try:
        memory_saver.check(environment, cuda)
    except UserError as error:
        return Pitfall(error.field, f"{error.value} {error.rule}", error.fix)
    return None


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
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
