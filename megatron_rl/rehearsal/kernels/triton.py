"""Triton for the project's own kernels. Launches compute nothing, and count what a kernel reads and writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from megatron_rl.rehearsal.kernels import RefusedKernelError, count, require


class JitFunction:
    """Stands in for a function with `@triton.jit`. A launch passes its arguments by name to `run(function, given)`."""

    def __init__(self, function: Any, run: Callable[[JitFunction, Mapping[str, Any]], None]) -> None:
        self.fn, self._run = function, run
        self.name = self.__name__ = function.__name__
        self.arg_names = function.__code__.co_varnames[: function.__code__.co_argcount]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            given = dict(zip(self.arg_names, args, strict=False)) | options
            for name, tensor in list_tensors(given):
                on = tensor.device.type
                require(on == "cuda", f"triton {self.name}", f"{name} {list(tensor.shape)} is on the {on}")
            sizes = grid(given) if callable(grid) else grid
            fits = all(size > 0 for size in sizes) and all(size <= 65535 for size in sizes[1:])
            require(fits, f"triton {self.name}", f"the grid is {tuple(sizes)}")
            self._run(self, given)

        return launch

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RefusedKernelError(f"the Triton function {self.name} is called on the host")


def list_tensors(given: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of all tensors in a kernel's arguments."""
    values = [(name, value) for name, each in given.items() for value in (each if isinstance(each, tuple) else (each,))]
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor)]


def install_into(triton: Any, run: Callable[[JitFunction, Mapping[str, Any]], None]) -> None:
    """Replace the functions of a module `triton` that are used on the host."""
    triton.jit = lambda function=None, **_: JitFunction(function, run) if function is not None else lambda each: JitFunction(each, run)
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()


def _count(function: JitFunction, given: Mapping[str, Any]) -> None:
    tensors = [tensor for _, tensor in list_tensors(given)]
    if function.name == "multiply_tile":
        x, weight = given["x"], given["weight"]
        count("fp8" if x.itemsize == 1 else "bf16", 2 * x.shape[0] * x.shape[1] * weight.shape[0], *tensors, kernel=function.name)
    elif function.name == "add_sorted_rows":  # of the sums, it reads and writes as many rows as there are tokens, at most
        rows, sums = given["rows"], given["sums"]
        count("other", 0, rows, sums[: len(rows)], sums[: len(rows)], kernel=function.name)
    else:
        count("other", 0, *tensors, kernel=function.name)


class _Anything(ModuleType):
    """A module that has every name that kernels' bodies and annotations use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_: None})


def install() -> None:
    triton: Any = ModuleType("triton")
    triton.language, triton.__version__, triton.__path__ = _Anything("triton.language"), "3.8.0", []
    install_into(triton, _count)
    sys.modules["triton"], sys.modules["triton.language"] = triton, triton.language
