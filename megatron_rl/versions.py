"""Versions of the packages that decide a run's numbers, for run.json and the report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

_PACKAGES = ("megatron-rl", "torch", "megatron-core", "sglang", "transformers", "transformer-engine", "math-verify")


def collect_versions() -> dict[str, str]:
    """Return name -> version of Python and of every listed package that is installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
