"""The GPU libraries' kernels as functions of shapes, one library a file: what their sources refuse is refused, what they allocate is
allocated, what they read, write and multiply is counted."""

from __future__ import annotations


class RefusedKernelError(RuntimeError):
    """A kernel's own check fails for these arguments."""


def require(condition: bool, kernel: str, rule: str) -> None:
    """Raise RefusedKernelError where a check of the library's source fails."""
    if not condition:
        raise RefusedKernelError(f"{kernel}: {rule}")
