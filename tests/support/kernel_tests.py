"""Helpers for tests of kernels: random numbers, and tests that run in Triton's interpreter."""

import functools
import importlib
from collections.abc import Callable

import torch

from support.processes import call_in_fresh_process
from support.triton_kernels import needs_triton


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers: the same ones for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_interpreter(test: Callable[[], None]) -> Callable[[], None]:
    """Run a test in a process of its own with Triton's interpreter, which Triton chooses when it is first imported."""

    @needs_triton
    @functools.wraps(test)
    def run() -> None:
        call_in_fresh_process(_call_undecorated, test.__module__, test.__name__, TRITON_INTERPRET="1")

    return run


def _call_undecorated(module: str, name: str) -> None:
    getattr(importlib.import_module(module), name).__wrapped__()
