"""Triton for the project's own kernels. Launches compute nothing, and count what a kernel reads and writes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from megatron_rl.kernels.experts.reference import tabulate_parts
from megatron_rl.rehearsal.device import set_value, value_of
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


def count_owned(owners: torch.Tensor) -> int:
    """Return the number of rows that an expert has, for its number in each row or -1. All rows have one if the numbers are unknown."""
    known = value_of(owners)
    return len(owners) if known is None else int((known >= 0).sum())


def _tabulate(given: Mapping[str, Any]) -> None:
    """Set the tables of `kernels.experts.reference.tabulate_parts` if the counts are known."""
    if (counts := value_of(given["counts"])) is not None:
        for name, values in zip(("sources", "owners", "places"), tabulate_parts(counts, given["size"]), strict=True):
            set_value(given[name], values)


def _count(function: JitFunction, given: Mapping[str, Any]) -> None:
    tensors = [tensor for _, tensor in list_tensors(given)]
    if function.name == "tabulate_tile":
        _tabulate(given)
    elif len(owners := given.get("owners", ())):  # rows of no expert are neither read nor written
        rows, owned = len(owners), count_owned(owners)
        tensors = [tensor[:owned] if tensor.shape[:1] == (rows,) else tensor for tensor in tensors]
    if function.name == "multiply_tile":
        x, weight = given["x"], given["weight"]
        count("fp8" if x.itemsize == 1 else "bf16", 2 * x.shape[0] * x.shape[1] * weight.shape[0], *tensors, kernel=function.name)
    elif function.name == "attend_rows":  # two products of causal attention, which computes half of the scores
        q, starts = given["q"], value_of(given["query_starts"])
        lengths = [len(q)] if starts is None else starts.diff().tolist()
        pairs = sum(length * length for length in lengths)
        count("bf16", 2 * pairs * q.shape[1] * q.shape[2], *tensors[:5], kernel="attention")
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
