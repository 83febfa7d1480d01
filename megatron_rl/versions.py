"""Versions and programs of installed packages."""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

_PACKAGES = ("megatron-rl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine", "math-verify")


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect the numerics of a run."""
    return {"python": platform.python_version()} | {package: version for package in _PACKAGES if (version := find_version(package))}


def find_version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def put_programs_on_path() -> None:
    """Add the interpreter's folder to PATH for this process and its children, because SGLang and FlashInfer run `ninja`."""
    folder, folders = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath).split(os.pathsep)
    if folder not in folders:
        os.environ["PATH"] = os.pathsep.join([folder, *folders])
