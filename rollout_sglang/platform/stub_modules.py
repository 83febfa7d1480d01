"""Stub modules for `triton` and `torchvision`, which SGLang imports but a CPU engine does not use. Every attribute of a stub is a stub too,
except for `HOST_FUNCTIONS`. Stubs are false and empty, and launching a kernel raises an error that names it. `install()` must run before
the first import of sglang in every process. It replaces no installed package; `replace` does so for rehearsals."""

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

_NAMES = ("triton", "torchvision")
_KERNEL_DECORATORS = ("triton.jit",)
HOST_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "triton.cdiv": lambda x, y: -(-x // y),
    "triton.next_power_of_2": lambda n: 1 << (n - 1).bit_length(),
}
"""Functions that SGLang also calls outside of kernels, with integers."""


class _ClassMeta(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Base(metaclass=_ClassMeta):
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()


class _Kernel:
    """A kernel's Python function. Launching it, `kernel[grid](...)`, raises RuntimeError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]

    def __getitem__(self, _: Any) -> Any:
        return _refuse_launch(f"{self.__module__}.{self.__wrapped__.__qualname__}")  # type: ignore[attr-defined]


def _refuse_launch(kernel: str) -> Callable[..., None]:
    def launch(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"the kernel {kernel} cannot run: its package is not installed")

    return launch


class _StubModule(types.ModuleType):
    """A module whose every attribute is a stub: a class if its name is capitalized, otherwise a module."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__file__ = __file__
        if "." not in name:
            self.__version__ = "0.0.0+standin"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if (function := HOST_FUNCTIONS.get(full_name)) is not None:
            return function
        if full_name in sys.modules or not name[:1].isupper():
            return importlib.import_module(full_name)
        value = _ClassMeta(name, (_Base,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Act as a decorator, with or without arguments."""
        decorate = _Kernel if self.__name__ in _KERNEL_DECORATORS else lambda function: function
        return decorate(args[0]) if len(args) == 1 and callable(args[0]) and not kwargs else decorate

    def __getitem__(self, _: Any) -> Any:
        return _refuse_launch(self.__name__)

    # without these three methods, torch's search for triton under tensor parallelism never ends
    def __contains__(self, _: Any) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class _StubImporter:
    """Finds and loads the stubs of `packages` and their submodules."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        loader: Any = self
        return importlib.machinery.ModuleSpec(name, loader, is_package=True) if name.split(".")[0] in self.packages else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, _: types.ModuleType) -> None: ...


def install(*more: str) -> None:
    """Install a finder of stubs for packages that are missing, including `more`."""
    missing = tuple(name for name in (*_NAMES, *more) if name not in sys.modules and importlib.util.find_spec(name) is None)
    if missing:
        sys.meta_path.append(_StubImporter(missing))


def replace(*packages: str) -> None:
    """Install a finder of stubs for packages, whether or not they are installed. None of them may be imported yet."""
    sys.meta_path.insert(0, _StubImporter(packages))


def block_megatron() -> None:
    """Make `import megatron` raise ModuleNotFoundError in this process, an engine's. SGLang's dumper imports Megatron if it is
    installed, and with it Transformer Engine, which an engine does not use and whose import can fail with other errors."""
    sys.modules["megatron"] = None  # type: ignore[assignment] # as `importlib` documents it
