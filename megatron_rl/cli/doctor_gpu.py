"""Known pitfalls of a GPU installation: what imports or starts and then fails late, or computes something else. For `megatron-rl doctor`.

Each check is a function of what it examines, so that it can be tested anywhere; `find_pitfalls` examines this machine. Versions come from
package metadata; only Transformer Engine's extension is really loaded, in a process of its own.
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
_DRIVERS = {12: 525, 13: 580}
"""Oldest driver branch for each major version of CUDA (NVIDIA's CUDA toolkit release notes, minor version compatibility)."""
ENGINE_PINS = ("torch", "sglang-kernel", "sgl-deep-gemm", "flashinfer-python")
_CORES = {"transformer-engine-cu12": 12, "transformer-engine-cu13": 13}
LOAD_STATEMENT = "import torch, transformer_engine.pytorch"

Versions = Mapping[str, str]
"""Installed distributions by name, as `list_distributions` gives them."""


class Pitfall(NamedTuple):
    """One row of doctor's table: what was examined, what is wrong with it, what to do."""

    what: str
    found: str
    fix: str


def find_pitfalls(cuda: str | None, driver: str | None) -> list[Pitfall]:
    """Return the pitfalls of this machine. `cuda`: what torch is built for; None for a CPU build, where most checks do not apply."""
    versions = list_distributions()
    pitfalls: list[Pitfall | None] = [check_scale_variable(os.environ), *check_transformer_engine_packages(versions, cuda)]
    if cuda is not None:
        pitfalls += [check_cuda(cuda), check_cublas(versions), check_driver(cuda, driver)]
        pitfalls += check_engine_pins(versions, read_engine_pins())
        pitfalls += [check_deep_gemm_packages(versions), check_nvcc(versions, read_nvcc_release(find_nvcc()))]
        pitfalls += [check_ninja(versions, shutil.which("ninja")), check_memory_saver(versions, os.environ, cuda)]
        pitfalls += [check_ld_bind_now(versions, os.environ), check_transformer_engine_import(versions)]
    return [pitfall for pitfall in pitfalls if pitfall is not None]


def list_distributions() -> dict[str, str]:
    """Return the version of every distribution by its normalized name."""
    return {canonicalize_name(dist.name): dist.version for dist in importlib.metadata.distributions() if dist.name}


def check_scale_variable(environment: Mapping[str, str]) -> Pitfall | None:
    """Transformer Engine reads the variable once, when it is imported, for its own recipe; only "1" means FP32 scales to it."""
    value = environment.get(SCALES_VARIABLE)
    if value in (None, "0"):
        return None
    recipe = "asks Transformer Engine's recipe for FP32 scales, and precision.scale_format is pow2 by default"
    fix = "unset it: back ends here are told precision.scale_format by name, TE's own layers are not"
    return Pitfall(SCALES_VARIABLE, f"{value!r} {recipe if value == '1' else 'is neither 0 nor 1'}", fix)


def check_transformer_engine_packages(versions: Versions, cuda: str | None) -> list[Pitfall]:
    """From PyPI it is three packages, of one version and for torch's CUDA; built from source it is one, which always fits."""
    names = [name for name in ("transformer-engine", "transformer-engine-torch", *_CORES) if name in versions]
    if not names:
        return []
    pitfalls, cores = [], [name for name in names if name in _CORES]
    if len({versions[name] for name in names}) > 1:
        listed = ", ".join(f"{name} {versions[name]}" for name in names)
        pitfalls.append(Pitfall("Transformer Engine", f"its packages are of different versions: {listed}", INSTALL))
    if cores and "transformer-engine-torch" not in names:
        pitfalls.append(Pitfall("Transformer Engine", "without transformer-engine-torch, its extension for PyTorch", INSTALL))
    wrong = [name for name in cores if cuda is not None and _CORES[name] != parse_version(cuda)[0]]
    if wrong or len(cores) > 1:
        fix = f"pip uninstall {' '.join(wrong or cores)}, then {INSTALL}"
        pitfalls.append(Pitfall("Transformer Engine", f"{', '.join(cores)} installed, torch is built for CUDA {cuda}", fix))
    return pitfalls


def check_transformer_engine_import(versions: Versions) -> Pitfall | None:
    """Import it for real: only that shows an extension built for another torch, which has symbols that this one lacks."""
    if "transformer-engine" not in versions:
        return None
    try:
        process = subprocess.run([sys.executable, "-c", LOAD_STATEMENT], capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return Pitfall("Transformer Engine", "is not imported after 120 s", INSTALL)
    return None if process.returncode == 0 else explain_import_error(process.stderr, versions.get("torch", "unknown"))


def explain_import_error(stderr: str, torch: str) -> Pitfall:
    """Return the pitfall that an import's traceback shows."""
    last = (stderr.strip().splitlines() or ["it ended without a message"])[-1]
    symbol = re.search(r"undefined symbol: (\w+)", last)
    if symbol and symbol[1].startswith("cublas"):
        fix = "unset LD_BIND_NOW, or install a newer nvidia-cublas"
        return Pitfall("Transformer Engine", f"cuBLAS lacks {symbol[1]}, which it names", fix)
    if symbol:
        pip = "pip install --no-build-isolation --no-cache-dir --no-deps --force-reinstall transformer-engine-torch"
        found = f"its extension was built for another torch than {torch}: {symbol[0]}"
        return Pitfall("Transformer Engine", found, f"NVTE_PYTORCH_FORCE_BUILD=TRUE {pip}, or {INSTALL}")
    return Pitfall("Transformer Engine", f"cannot be imported: {last}", INSTALL)


def check_ld_bind_now(versions: Versions, environment: Mapping[str, str]) -> Pitfall | None:
    """Transformer Engine 2.20 names a cuBLAS function, for grouped products, that CUDA 13.0's cuBLAS lacks; it is loaded lazily."""
    if "transformer-engine" not in versions or not environment.get("LD_BIND_NOW"):
        return None
    found = "is set: Transformer Engine cannot be loaded where cuBLAS lacks a function that it never calls"
    return Pitfall("LD_BIND_NOW", found, "unset it")


def check_cuda(cuda: str) -> Pitfall | None:
    if parse_version(cuda) >= MIN_CUDA:
        return None
    found = f"torch is built for {cuda}; block-scaled products exist from {'.'.join(map(str, MIN_CUDA))} on"
    return Pitfall("CUDA", found, f"{INSTALL}, or precision.backend = emulated")


def check_cublas(versions: Versions) -> Pitfall | None:
    """The library is a separate package, which another package may have downgraded."""
    for name in ("nvidia-cublas", "nvidia-cublas-cu12"):
        if name in versions and parse_version(versions[name])[:2] < MIN_CUDA:
            return Pitfall("cuBLAS", f"{name} {versions[name]} has no block-scaled products", INSTALL)
    return None


def check_driver(cuda: str, driver: str | None) -> Pitfall | None:
    oldest = _DRIVERS.get(parse_version(cuda)[0])
    if driver is None or oldest is None or not parse_version(driver) or parse_version(driver)[0] >= oldest:
        return None
    return Pitfall("driver", f"{driver} is older than CUDA {cuda} asks for", f"install driver {oldest} or newer")


def read_engine_pins() -> dict[str, str]:
    """Return the exact versions of compiled packages that the installed SGLang asks for."""
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
    """Return the compiled packages whose version is not the one that SGLang was built and tested with."""
    return [
        Pitfall(name, f"{versions[name]}, and sglang {versions.get('sglang')} asks for {pin}", INSTALL)
        for name, pin in pins.items()
        if name in versions and versions[name].partition("+")[0] != pin
    ]


def check_deep_gemm_packages(versions: Versions) -> Pitfall | None:
    """Both are imported as `deep_gemm`: the one installed last overwrote the other's files."""
    if "sgl-deep-gemm" not in versions or "deep-gemm" not in versions:
        return None
    fix = "pip uninstall both, then install the one you want"
    return Pitfall("DeepGEMM", "sgl-deep-gemm and deep-gemm are both installed, under the same import name", fix)


def check_nvcc(versions: Versions, nvcc: str | None) -> Pitfall | None:
    """DeepGEMM compiles its kernels when they are first used. `nvcc`: the compiler's release."""
    if not {"sgl-deep-gemm", "deep-gemm"} & set(versions):
        return None
    fix = "install the CUDA toolkit that torch was built for and set CUDA_HOME"
    if nvcc is None:
        return Pitfall("nvcc", "not found: DeepGEMM cannot compile its kernels, in the trainer nor in the engine", fix)
    if parse_version(nvcc) < MIN_CUDA:
        return Pitfall("nvcc", f"{nvcc} is older than {'.'.join(map(str, MIN_CUDA))}, which DeepGEMM refuses", fix)
    return None


def check_ninja(versions: Versions, ninja: str | None) -> Pitfall | None:
    """SGLang and flashinfer call it by its bare name when they build kernels. `ninja`: its path; commands put the interpreter's folder
    on PATH."""
    if ninja or not {"sglang-kernel", "flashinfer-python"} & set(versions):
        return None
    return Pitfall("ninja", "not found: SGLang and flashinfer cannot build their kernels, and no engine starts", INSTALL)


def check_memory_saver(versions: Versions, environment: Mapping[str, str], cuda: str) -> Pitfall | None:
    """What keeps colocated engines from releasing their memory."""
    if "torch-memory-saver" not in versions:
        return None
    try:
        memory_saver.check(environment, cuda)
    except UserError as error:
        return Pitfall(error.field, f"{error.value} {error.rule}", error.fix)
    return None


def read_nvcc_release(home: str | None) -> str | None:
    """Return the release, such as `13.0`, of the compiler that `find_nvcc` found: a folder with bin/nvcc, or the compiler itself."""
    if home is None:
        return None
    path = Path(home, "bin", "nvcc") if Path(home).is_dir() else Path(home)
    match = re.search(r"release ([\d.]+)", run_command(str(path), "--version") or "")
    return match[1] if match else None


def run_command(*command: str) -> str | None:
    """Return what a short command prints; None where it fails or is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
