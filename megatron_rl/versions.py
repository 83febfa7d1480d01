"""Versions of what shapes a run's numbers, for run.json and the report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

_PACKAGES = ("megatron-rl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine", "math-verify")


def collect_versions() -> dict[str, str]:
    """Name -> version of every package of the list that is installed, and of Python."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
