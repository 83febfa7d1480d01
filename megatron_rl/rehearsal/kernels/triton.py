"""Triton, whose kernels are launched and compute nothing: what each reads and writes is counted. The project's own kernels alone use it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from megatron_rl.rehearsal.kernels import require

_recorder: list[Callable[[], Any]] = []


class _Kernel:
    """A function with `@triton.jit`."""

    def __init__(self, function: Any) -> None:
        self.name, self.arg_names = function.__name__, function.__code__.co_varnames[: function.__code__.co_argcount]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                require(
                    tensor.device.type == "cuda", f"triton {self.name}", f"a pointer {list(tensor.shape)} is on the {tensor.device.type}"
                )
            sizes = grid(options) if callable(grid) else grid
            require(all(size > 0 for size in sizes) and all(size <= 65535 for size in sizes[1:]), f"triton {self.name}", f"grid {sizes}")
            _recorder[0]().work(*_count(self.name, args, options), *tensors, kernel=self.name)

        return launch


def _count(name: str, args: tuple, options: dict) -> tuple[str, int]:
    if name == "multiply_tile":
        x, weight = args[:2]
        return ("fp8" if x.itemsize == 1 else "bf16"), 2 * x.shape[0] * x.shape[1] * weight.shape[0]
    return "other", 0


class _Anything(ModuleType):
    """Names that kernels' bodies and annotations use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_: None})


def install(recorder: Callable[[], Any]) -> None:
    _recorder[:] = [recorder]
    triton, language = ModuleType("triton"), _Anything("triton.language")
    vars(triton).update(
        __version__="3.8.0",
        __path__=[],
        language=language,
        jit=lambda function=None, **_: _Kernel(function) if function is not None else _Kernel,
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )
    sys.modules["triton"], sys.modules["triton.language"] = triton, language
