"""What is installed: versions of the packages that decide a run's numbers, for run.json and the report; programs that packages bring."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

_PACKAGES = ("megatron-rl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine", "math-verify")


def collect_versions() -> dict[str, str]:
    """Return name -> version of Python and of every listed package that is installed."""
    return {"python": platform.python_version()} | {package: version for package in _PACKAGES if (version := find_version(package))}


def find_version(package: str) -> str | None:
    """Return the installed version of a package, None without one."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def put_programs_on_path() -> None:
    """Let this process and its children find the programs that packages installed beside the interpreter, whether or not its environment
    was activated: SGLang and flashinfer build kernels with a bare `ninja`."""
    folder, folders = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath).split(os.pathsep)
    if folder not in folders:
        os.environ["PATH"] = os.pathsep.join([folder, *folders])
