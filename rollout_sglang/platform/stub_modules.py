"""Empty stand-ins for `triton` and `torchvision`, so that SGLang imports on a machine that has neither.

Both are optional for what runs on a CPU, but SGLang imports them unconditionally. A stand-in answers attribute look-ups with more
stand-ins and is false, empty and not iterable into anything; calling a kernel through it raises. `install()` must run before the
first import of sglang, in every process; where the real package is installed nothing is replaced.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

_NAMES = ("triton", "torchvision")


class _ClassMeta(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Base(metaclass=_ClassMeta):
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()


class _StubModule(types.ModuleType):
    """A module whose every attribute is a stand-in too: names in capitals are classes, others modules."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, _LOADER, is_package=True)
        if "." not in name:
            self.__version__ = "0.0.0+standin"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        value: Any
        if name[:1].isupper():
            value = _ClassMeta(name, (_Base,), {"__module__": self.__name__})
        else:
            value = sys.modules[full] = _StubModule(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Works as a decorator, with or without arguments."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda function: function

    def __getitem__(self, _: Any) -> Any:
        def launch(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"the kernel {self.__name__} cannot run: its package is not installed")

        return launch

    # without these three, torch's search for triton under tensor parallelism never ends
    def __contains__(self, _: Any) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False


class _Loader:
    def create_module(self, spec: Any) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, _: types.ModuleType) -> None: ...


_LOADER: Any = _Loader()


class _Finder:
    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.split(".")[0] in self._roots:
            return importlib.machinery.ModuleSpec(name, _LOADER, is_package=True)
        return None


def install() -> tuple[str, ...]:
    """Installs the finder for the packages that are missing; returns their names."""
    missing = tuple(name for name in _NAMES if name not in sys.modules and importlib.util.find_spec(name) is None)
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder(missing))
    return missing
