"""Identity of the kernels of a precision graph: which function computes an operator, in which order it adds, and in which version.

Two operators have the same kernel if name, order and version are equal, and the same order if two kernels are known to add and round alike.
This module does not import torch.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_rl.versions import find_version

SAME_KERNEL, SAME_ORDER, DIFFERS = "same kernel", "same order", "differs"
OWN_PACKAGES = ("megatron_rl", "rollout_sglang", "parallel")
_HELPERS = ("megatron_rl.kernels", "parallel.")
_DISTRIBUTIONS = {"megatron": "megatron-core", "sgl_kernel": "sglang-kernel", "deep_gemm": "sgl-deep-gemm"}
_CPUINFO = Path("/proc/cpuinfo")

LOOKUP = "copies rows"
ROUNDED_SILU = "silu(gate) rounded, times up rounded"
ROUNDED_ROTATION = "cos, sin and both products rounded"
BLOCKS_OF_K = "FP32 sums over blocks of 128 of K"
SUMS_BY_EXPERT = "FP32 sums in the order of experts"
VOCABULARY_TREE = "exponentials by the tree over equal parts of the vocabulary"


@dataclass(frozen=True)
class Kernel:
    """What computes an operator."""

    name: str  # module and name of the function
    version: str = ""  # of its package, and a digest of its source
    order: str = ""  # order of additions and roundings, if it is known to be that of another kernel too

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, f"({self.version})" if self.version else "", f"[{self.order}]" if self.order else "")))


@dataclass(frozen=True)
class Machine:
    """What kernels of all operators run on."""

    device: str = ""  # model name
    packages: tuple[str, ...] = ()  # "name version" of those that have kernels


def compare(one: Kernel | None, other: Kernel | None) -> str:
    """Return the verdict about two kernels of one operator. An unknown kernel equals none."""
    if one is None or other is None:
        return DIFFERS
    if one == other:
        return SAME_KERNEL
    return SAME_ORDER if one.order and one.order == other.order and one.name != other.name else DIFFERS


def identify(function: Callable[..., Any], order: str = "", on_gpu: bool = False) -> Kernel:
    """Return the identity of a function: a kernel, or for `kernels.with_kernel` the one that runs on this device."""
    function = unwrap(function)
    module = function.__module__
    if on_gpu and module.endswith(".reference") and hasattr(function, "__wrapped__"):
        module = module.replace(".reference", ".triton")
    package = module.partition(".")[0]
    name = f"{module}.{function.__qualname__}".removeprefix("megatron_rl.")
    if package in OWN_PACKAGES:
        return Kernel(name, _digest_module(module), order)
    return Kernel(name, f"{find_package(package)}, {_digest_source(function)}", order)


def in_parts(kernel: Kernel, parts: int) -> Kernel:
    """Return the identity of a row-parallel product that adds the rounded products of `parts` parts of K (`kernels.sums.ranks`)."""
    sums = f"{parts} rounded parts in the order of ranks"
    return replace(kernel, order=f"{kernel.order}, {sums}") if kernel.order else replace(kernel, version=f"{kernel.version}, {sums}")


def unwrap(function: Any) -> Any:
    """Return the function of a bound method or of a partial."""
    while isinstance(function, functools.partial) or inspect.ismethod(function):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def find_package(module: str) -> str:
    """Return name and version of the package of a module."""
    name = _DISTRIBUTIONS.get(module, module)
    return f"{name} {find_version(name) or 'unknown'}"


def read_machine(torch: Any) -> Machine:
    """Return what this process computes on. `torch` is the module."""
    packages = ["torch", *(("triton", "sgl_kernel", "deep_gemm", "transformer-engine") if torch.cuda.is_available() else ())]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _read_cpu()
    return Machine(device, tuple(find_package(package) for package in packages))


def join_machines(machines: Iterable[Machine]) -> Machine:
    """Return what several ranks compute on, each model of device and each package once."""
    seen = list(machines)
    packages = dict.fromkeys(package for machine in seen for package in machine.packages)
    return Machine(" and ".join(dict.fromkeys(machine.device for machine in seen)), tuple(packages))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


@functools.cache
def _read_cpu() -> str:
    lines = _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@functools.cache
def _digest_module(module: str) -> str:
    """Return the digest of a module and of what it imports of `_HELPERS`, which chooses launches, tiles and alignments."""
    sources, pending = dict[str, bytes](), [module]
    while pending:
        if (name := pending.pop()) not in sources:
            sources[name], imported = _read_source(name)
            pending += imported
    return digest(b"".join(source for _, source in sorted(sources.items())))


@functools.cache
def _read_source(module: str) -> tuple[bytes, tuple[str, ...]]:
    """Return the source of a module of this project, and the names that it imports from `_HELPERS`; nothing if there is no such module."""
    top, *rest = module.split(".")
    found = find_spec(top)
    assert found is not None and found.origin is not None
    base = Path(found.origin).parent.joinpath(*rest)
    path = next((file for file in (base.parent / f"{base.name}.py", base / "__init__.py") if file.exists()), None)
    if path is None:
        return b"", ()
    source, names = path.read_bytes(), list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_HELPERS):
            names += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return source, tuple(names)


def _digest_source(function: Any) -> str:
    try:
        return digest(inspect.getsource(inspect.unwrap(function)).encode())
    except (OSError, TypeError):  # built-in functions have the version of their package
        return "built in"


def describe_machines(rollout: Machine, training: Machine) -> list[str]:
    """Return one line for each difference of device or packages."""
    sides: Sequence[Machine] = (rollout, training)
    lines = []
    if rollout.device != training.device:
        lines.append(f"the engine's device is {rollout.device}, the trainer's {training.device}; use one model of device")
    if rollout.packages != training.packages:
        only = [", ".join(sorted({*own.packages} - {*other.packages})) or "nothing else" for own, other in (sides, sides[::-1])]
        lines.append(f"the engine has {only[0]}, the trainer {only[1]}; install the same versions")
    return lines
