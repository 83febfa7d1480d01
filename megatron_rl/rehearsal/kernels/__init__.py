"""Kernels of GPU libraries as shape functions, one library per file. They make the checks of the libraries' sources, allocate what the
libraries allocate, and count what the kernels read, write and multiply."""

from collections.abc import Callable
from typing import Any

_recorder: list[Callable[[], Any]] = []


class RefusedKernelError(RuntimeError):
    """A kernel's own check fails for these arguments."""


def require(condition: bool, kernel: str, rule: str) -> None:
    """Raise RefusedKernelError if a check of the library's source fails."""
    if not condition:
        raise RefusedKernelError(f"{kernel}: {rule}")


def set_recorder(recorder: Callable[[], Any]) -> None:
    """Set the function that returns the recorder of the current rank."""
    _recorder[:] = [recorder]


def count(kind: str, flops: int, *tensors: Any, kernel: str = "") -> None:
    """Count a kernel's FLOPs and the tensors that it reads and writes; see `Recorder.work`."""
    _recorder[0]().work(kind, flops, *tensors, kernel=kernel)
