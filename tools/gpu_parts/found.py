"""What this machine has that the GPU tier may use: GPU, toolkit, packages. Reads metadata; imports torch and nothing else that is heavy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PACKAGES: dict[str, tuple[str, ...]] = {  # what parts ask for: the distributions that provide it
    "torch": ("torch",),
    "triton": ("triton",),
    "megatron-core": ("megatron-core",),
    "sglang": ("sglang",),
    "sglang-kernel": ("sglang-kernel", "sgl-kernel"),
    "deep_gemm": ("sgl-deep-gemm", "deep-gemm", "deep_gemm"),
    "transformer-engine": ("transformer-engine", "transformer_engine"),
    "flashinfer": ("flashinfer-python",),
    "transformers": ("transformers",),
    "pydantic": ("pydantic",),
    "typer": ("typer",),
    "math-verify": ("math-verify",),
    "pytest": ("pytest",),
}
_FIXES = {
    "gpu": "run it on a machine with an NVIDIA GPU, its driver, and torch's CUDA build",
    "hopper": "run it on a Hopper GPU (H100, H200)",
    "nvcc": "install the CUDA toolkit, 12.9 or newer, and set CUDA_HOME",
}


def fix(want: str) -> str:
    """How to get what `Machine.has` knows."""
    return _FIXES.get(want, "bash launch/install_gpu.sh")


@dataclass(frozen=True)
class Machine:
    """`packages` maps the names of `PACKAGES` to versions, None where one is not installed."""

    gpu: str | None
    capability: tuple[int, int] | None
    memory_gib: float | None
    driver: str | None
    cuda: str | None
    """The version that torch is built for."""
    nvcc: str | None
    python: str
    packages: Mapping[str, str | None]
    why_no_gpu: str = ""

    def has(self, want: str) -> bool:
        """`gpu`, `hopper`, `nvcc`, or a name of `PACKAGES`."""
        if want == "gpu":
            return self.gpu is not None
        if want == "hopper":
            return self.capability is not None and self.capability[0] == 9
        if want == "nvcc":
            return self.nvcc is not None
        return self.packages[want] is not None

    def lacks(self, wants: Sequence[str]) -> list[str]:
        """Those of `wants` that are not here."""
        return [want for want in wants if not self.has(want)]


def find() -> Machine:
    """This machine, as this Python sees it."""
    packages = {name: _version(names) for name, names in PACKAGES.items()}
    nvcc = nvcc_version()
    try:
        import torch
    except ImportError as error:
        return _without(packages, nvcc, None, f"torch cannot be imported ({error})")
    if torch.version.cuda is None:
        return _without(packages, nvcc, None, f"torch {torch.__version__} is a CPU build")
    if not torch.cuda.is_available():
        return _without(packages, nvcc, torch.version.cuda, f"torch {torch.__version__} sees no GPU")
    properties = torch.cuda.get_device_properties(0)
    return Machine(
        properties.name,
        (properties.major, properties.minor),
        round(properties.total_memory / 2**30, 1),
        _driver(),
        torch.version.cuda,
        nvcc,
        platform.python_version(),
        packages,
    )


def _without(packages: dict[str, str | None], nvcc: str | None, cuda: str | None, why: str) -> Machine:
    return Machine(None, None, None, _driver(), cuda, nvcc, platform.python_version(), packages, why)


def _version(names: tuple[str, ...]) -> str | None:
    """Of the first that is installed; `unknown` for a package without metadata that can be imported all the same."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    spec = importlib.util.find_spec(names[-1].replace("-", "_"))
    return "unknown" if spec is not None else None


def nvcc_version() -> str | None:
    """`13.0` of the compiler in CUDA_HOME, CUDA_PATH or on PATH; None without one."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    places = [os.path.join(home, "bin", "nvcc") for home in homes]
    for nvcc in [*places, shutil.which("nvcc")]:
        if nvcc and os.access(nvcc, os.X_OK):
            told = re.search(r"release ([\d.]+)", _output(nvcc, "--version"))
            return told.group(1) if told else "unknown"
    return None


def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0] or None


def _output(*command: str) -> str:
    """What a short command prints, nothing where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
