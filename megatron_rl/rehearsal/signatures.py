"""Holds the kernels' functions of shapes against the libraries that they stand for, where those are installed.

Each file of kernels has a table `STANDS_FOR`: name of a library's function -> its function of shapes. The same parameters must be at the
same places. A library may have more of them, with defaults; a function of shapes may take those as `**others`. Libraries are imported,
behind a pretended Hopper GPU where there is no driver, but for Transformer Engine, whose import needs an extension that is built from
source: its functions are read from their files.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import os
import pkgutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

LIBRARIES = ("deep_gemm", "transformer_engine", "sgl_kernel", "flashinfer")
_IN_SOURCE = "transformer_engine"
_DRIVER = "libcuda.so.1"


def compare_installed() -> list[str] | None:
    """Return what differs, a line each, as a process of its own finds it; None where no library is installed."""
    if not any(map(is_installed, LIBRARIES)):
        return None
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if not _has_driver():
            from megatron_rl.rehearsal.hopper import build_stubs

            environment |= build_stubs(Path(folder), Path(sysconfig.get_paths()["purelib"]))
        command = [sys.executable, "-m", "rollout_sglang.rehearsal.signatures"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout:
        return [f"the installed libraries cannot be compared: {(done.stderr.strip().splitlines() or [''])[-1]}"]
    return done.stdout.splitlines()


def _has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    return True


def is_installed(library: str) -> bool:
    return PathFinder.find_spec(library) is not None  # whatever this process has in its place


def compare(stands_for: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Return what differs, a line each, with library, function and parameter; of the libraries that are installed."""
    found: list[str] = []
    for name, ours in stands_for.items():
        if is_installed(name.partition(".")[0]):
            try:
                found += _differences(name, inspect.signature(ours), inspect.signature(_find(name)))
            except (ImportError, AttributeError, OSError, StopIteration) as error:
                found.append(f"{name} is not found: {type(error).__name__}: {error}")
    return found


def _differences(name: str, ours: inspect.Signature, theirs: inspect.Signature) -> Iterable[str]:
    """`theirs` of a function in C++ may be `*args, **kwargs`, which says nothing."""
    known = theirs.parameters
    if any(each.kind is each.VAR_POSITIONAL for each in known.values()):
        return
    places, own = list(known), ours.parameters
    for place, parameter in enumerate(own.values()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in known:
            yield f"{name} has no parameter {parameter.name}: it has {', '.join(known)}"
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and places.index(parameter.name) != place:
            yield f"{name} has its parameter {parameter.name} at place {places.index(parameter.name)}, the rehearsal at {place}"
    for parameter in known.values():
        if parameter.default is parameter.empty and parameter.name not in own and parameter.kind is not parameter.VAR_KEYWORD:
            yield f"{name} needs a parameter {parameter.name}, which the rehearsal does not know"


def _find(name: str) -> Callable[..., Any]:
    """Return an installed function, or of one that is read from source an empty one with its parameters."""
    found: Callable[..., Any] = _read(name.split(".")) if name.startswith(_IN_SOURCE) else pkgutil.resolve_name(name)
    return found


def _read(path: list[str]) -> Callable[..., Any]:
    spec = PathFinder.find_spec(path[0])
    assert spec is not None and spec.origin is not None
    file, rest = Path(spec.origin).parent, path[1:]
    while file.is_dir():
        file, rest = (file / rest[0] if (file / rest[0]).is_dir() else file / f"{rest[0]}.py"), rest[1:]
    node: Any = ast.parse(file.read_text())
    for part in rest:
        node = next(each for each in node.body if getattr(each, "name", "") == part)
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
        if argument is not None:
            argument.annotation = None
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.kw_defaults = [default and ast.Constant(None) for default in node.args.kw_defaults]
    node.body, node.decorator_list, node.returns, names = [ast.Pass()], [], None, dict[str, Any]()
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(file), "exec"), names)  # its parameters alone are left
    found: Callable[..., Any] = names[node.name]
    return found
