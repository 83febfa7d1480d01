"""One clear line out of a pydantic `ValidationError`: the field, the value, the rule and the fix.

Works on any tree of pydantic models; knows nothing of the project's fields.
"""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_rl.errors import UserError

_NUMBER_OR_BOOL = re.compile(r"[-+]?[0-9_]+(\.[0-9_]+)?(e[-+]?[0-9]+)?|true|false")
_RULES = {
    "missing": "is required",
    "extra_forbidden": "unknown key",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
}


def to_user_error(error: ValidationError, root: type[BaseModel]) -> UserError:
    """The first finding as a `UserError`; unknown keys go first, as a misspelt key also makes the right one missing."""
    findings = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = findings[0]
    path = ".".join(str(part) for part in first["loc"]) or "config"
    value = first["input"]
    if first["type"] == "missing" or isinstance(value, dict):  # the input is then the whole table around the field
        value = None
    rest = len(findings) - 1
    more = "" if not rest else f" ({rest} more {'error' if rest == 1 else 'errors'} after this one)"
    return UserError(path, value, _rule(first), (_fix(first, path, root) + more).strip())


def find_section(path: str, root: type[BaseModel]) -> type[BaseModel] | None:
    """The model at a dotted path, None where the path ends at a plain field or nowhere. `""` is the root itself.

    The number of a table in a list leads nowhere else: `data.train.0` is the model of every table in `data.train`.
    """
    model: type[BaseModel] | None = root
    for part in _names(path):
        info = model.model_fields.get(part) if model else None
        model = _model_in(info.annotation) if info else None
    return model


def find_nearest_field(path: str, root: type[BaseModel]) -> str | None:
    """The existing dotted path most like `path`: in the same section first, then by its last name, below the same
    top section or anywhere, outer sections first."""
    parent, _, name = ".".join(_names(path)).rpartition(".")
    everything = sorted(_paths(root), key=lambda p: p.count("."), reverse=True)
    siblings = [p for p in everything if p.rpartition(".")[0] == parent]
    relatives = [p for p in everything if p.partition(".")[0] == parent.partition(".")[0]]
    for candidates, cutoff in ((siblings, 0.6), (relatives, 0.8), (everything, 0.8)):
        names = {p.rpartition(".")[2]: p for p in candidates}  # of equal names the outermost, coming last, stays
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[close[0]]
    return None


def _names(path: str) -> list[str]:
    """The parts of a dotted path without the numbers of tables in a list."""
    return [part for part in path.split(".") if part and not part.isdigit()]


def _rule(detail: ErrorDetails) -> str:
    said = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _RULES.get(detail["type"], said)


def _fix(detail: ErrorDetails, path: str, root: type[BaseModel]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        if near := find_nearest_field(path, root):
            return f"did you mean {near}?"
        parent = path.rpartition(".")[0]
        section = find_section(parent, root) or root
        return f"known keys{f' of {parent}' if parent else ''}: {', '.join(section.model_fields)}"
    if kind == "missing":
        return _how_to_add(path, root)
    if kind == "literal_error" and isinstance(value, str):
        close = difflib.get_close_matches(value, detail["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", "), n=1)
        return f"did you mean {close[0]!r}?" if close else _default(path, root)
    if kind == "string_type" or kind == "path_type":
        return "put it in quotes"
    if kind != "value_error" and isinstance(value, str) and _NUMBER_OR_BOOL.fullmatch(value):
        return "write it without quotes"
    return _default(path, root)


def _default(path: str, root: type[BaseModel]) -> str:
    """What the field would be if left out, as the last hint; nothing where there is no plain default."""
    parent, _, name = path.rpartition(".")
    section = find_section(parent, root)
    info = section.model_fields.get(name) if section else None
    plain = info is not None and isinstance(info.default, (str, int, float, tuple, Path))
    return f"the default is {json.dumps(info.default, default=str)}" if info and plain else ""


def _how_to_add(path: str, root: type[BaseModel]) -> str:
    section = find_section(path, root)
    if section is None:  # a plain field
        parent, _, name = path.rpartition(".")
        return f"add `{name} = ...` under [{parent}]"
    required = [name for name, info in section.model_fields.items() if info.is_required()]
    return f"add a table [{path}]" + (f" with {', '.join(required)}" if required else "")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model class in `Model`, `Model | None` or `tuple[Model, ...]`."""
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if inner := _model_in(info.annotation):
            yield from _paths(inner, f"{prefix}{name}.")
