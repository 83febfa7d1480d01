"""Versions of the packages that decide a run's numbers, for run.json and the report."""

from __future__ import annotations

import importlib.metadata
import platform

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
