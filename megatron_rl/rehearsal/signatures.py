"""Compares the shape functions that stand in for library kernels with the installed libraries, for tools/gpu_packages.py.

Each kernel file has a table `STANDS_FOR` that maps the name of a library function to its shape function. Both must have the same parameters
at the same positions. The library may have additional parameters with defaults, and a shape function may accept those as `**others`.
Libraries are imported. Transformer Engine is read from its source files, because importing it requires an extension that is built from
source.
"""

import ast
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

LIBRARIES = ("deep_gemm", "transformer_engine", "sgl_kernel", "flashinfer")
_READ_FROM_SOURCE = "transformer_engine"


def is_installed(library: str) -> bool:
    """Return whether a library is installed, regardless of what this process imported in its place."""
    return PathFinder.find_spec(library) is not None


def compare(stands_for: Mapping[str, Callable[..., Any]]) -> list[str]:
    """Return the differences from installed libraries, one line each, with library, function and parameter."""
    found: list[str] = []
    for name, ours in stands_for.items():
        if is_installed(name.partition(".")[0]):
            try:
                theirs: Callable[..., Any] = _read(name.split(".")) if name.startswith(_READ_FROM_SOURCE) else pkgutil.resolve_name(name)
                found += _list_differences(name, inspect.signature(ours), inspect.signature(theirs))
            except (ImportError, AttributeError, OSError, StopIteration) as error:
                found.append(f"{name} is not found: {type(error).__name__}: {error}")
    return found


def _list_differences(name: str, ours: inspect.Signature, theirs: inspect.Signature) -> Iterable[str]:
    """Yield the differences. A C++ function with the signature `*args, **kwargs` reveals nothing."""
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


def _read(path: list[str]) -> Callable[..., Any]:
    """Return an empty function with the parameters of a function in a source file."""
    spec = PathFinder.find_spec(path[0])
    assert spec is not None and spec.origin is not None
    file, rest = Path(spec.origin).parent, path[1:]
    while file.is_dir():
        file, rest = (file / rest[0] if (file / rest[0]).is_dir() else file / f"{rest[0]}.py"), rest[1:]
    node: Any = ast.parse(file.read_text(encoding="utf-8"))
    for part in rest:
        node = next(each for each in node.body if getattr(each, "name", "") == part)
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
        if argument is not None:
            argument.annotation = None
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.kw_defaults = [default and ast.Constant(None) for default in node.args.kw_defaults]
    node.body, node.decorator_list, node.returns, names = [ast.Pass()], [], None, dict[str, Any]()
    exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(file), "exec"), names)
    found: Callable[..., Any] = names[node.name]
    return found
