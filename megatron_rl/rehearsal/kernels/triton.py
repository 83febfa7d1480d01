"""Triton, for the project's own kernels. Launches compute nothing, and count what a kernel reads and writes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from megatron_rl.rehearsal.kernels import count, require


class _Kernel:
    """Stands in for a function with `@triton.jit`."""

    def __init__(self, function: Any) -> None:
        self.name, self.arg_names = function.__name__, function.__code__.co_varnames[: function.__code__.co_argcount]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                on = tensor.device.type
                require(on == "cuda", f"triton {self.name}", f"a pointer {list(tensor.shape)} is on the {on}")
            sizes = grid(options) if callable(grid) else grid
            require(all(size > 0 for size in sizes) and all(size <= 65535 for size in sizes[1:]), f"triton {self.name}", f"grid {sizes}")
            if self.name == "multiply_tile":
                x, weight = args[:2]
                kind = "fp8" if x.itemsize == 1 else "bf16"
                count(kind, 2 * x.shape[0] * x.shape[1] * weight.shape[0], *tensors, kernel=self.name)
            else:
                count("other", 0, *tensors, kernel=self.name)

        return launch


class _Anything(ModuleType):
    """A module that has every name that kernels' bodies and annotations use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *_: None})


def install() -> None:
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
