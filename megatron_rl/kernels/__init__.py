"""Operators whose bits do not depend on the batch around a row.

Modules named `triton` are imported inside functions only: Triton comes with GPU builds of torch.
"""

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def with_kernel(reference: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs `reference`, of a module of that name, or, for tensors on a GPU, the function with the same name and
    arguments of the module `triton` beside it."""

    @functools.wraps(reference)
    def run(*args: P.args, **options: P.kwargs) -> T:
        if not any(getattr(arg, "is_cuda", False) for arg in (*args, *options.values())):
            return reference(*args, **options)
        kernels = importlib.import_module(reference.__module__.replace(".reference", ".triton"))
        result: T = getattr(kernels, reference.__name__)(*args, **options)
        return result

    return run
