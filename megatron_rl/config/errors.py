"""Conversion of pydantic's `ValidationError` into a `UserError` with one line for each mistake. Works for any tree of pydantic models."""

import difflib
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megatron_rl.errors import UserError

_MOST_MISTAKES = 20
_LONGEST_NAME = 80  # names are compared with longer texts for too long, and those are no misspelled names
_NUMBER_OR_BOOL = re.compile(r"[-+]?[0-9_]+(\.[0-9_]+)?(e[-+]?[0-9]+)?|true|false")
_RULES = {
    "missing": "is required",
    "extra_forbidden": "unknown key",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
}


def to_user_error(error: ValidationError, root: type[BaseModel]) -> UserError:
    """Return the mistakes as one `UserError`. Unknown keys come first, because a misspelled key is often also reported as missing."""
    found = error.errors(include_url=False)
    # a list with a bad item is also reported itself
    outer = {detail["loc"][:length] for detail in found for length in range(len(detail["loc"]))}
    details = sorted((each for each in found if each["loc"] not in outer), key=lambda detail: detail["type"] != "extra_forbidden")
    shown = [_describe(detail, root) for detail in details[:_MOST_MISTAKES]]
    if more := len(details) - len(shown):
        shown.append(UserError("config", None, f"has {more} more mistake{'s' * (more > 1)}"))
    return UserError.join(shown)


def _describe(detail: ErrorDetails, root: type[BaseModel]) -> UserError:
    path = ".".join(str(part) for part in detail["loc"]) or "config"
    # the input is the whole table, or the whole text
    is_table = detail["type"] in ("missing", "json_invalid") or isinstance(detail["input"], dict)
    rule = _RULES.get(detail["type"], detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be"))
    return UserError(path, None if is_table else detail["input"], rule, _fix(detail, path, root))


def find_section(path: str, root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model at a dotted path, or None if there is no section at this path. `""` is the root. Indices into lists are skipped:
    `data.train.0` returns the model of all tables in `data.train`."""
    model: type[BaseModel] | None = root
    for part in _names(path):
        info = model.model_fields.get(part) if model else None
        model = _model_in(info.annotation) if info else None
    return model


def find_field(path: str, root: type[BaseModel]) -> FieldInfo | None:
    """Return the field at a dotted path, or None if it does not exist."""
    parent, _, name = path.rpartition(".")
    section = find_section(parent, root)
    return section.model_fields.get(name) if section else None


def find_nearest_field(path: str, root: type[BaseModel]) -> str | None:
    """Return the known path most similar to `path`, or None. Search its section first, then its top-level section, then all sections."""
    parent, _, name = ".".join(_names(path)).rpartition(".")
    fields = sorted(_paths(root), key=lambda field: field.count("."), reverse=True)
    siblings = [field for field in fields if field.rpartition(".")[0] == parent]
    same_section = [field for field in fields if field.partition(".")[0] == parent.partition(".")[0]]
    for candidates, cutoff in () if len(name) > _LONGEST_NAME else ((siblings, 0.6), (same_section, 0.8), (fields, 0.8)):
        names = {field.rpartition(".")[2]: field for field in candidates}  # of equal names the outermost comes last and is kept
        if close := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[close[0]]
    return None


def _names(path: str) -> list[str]:
    """Return the parts of a dotted path without indices into lists."""
    return [part for part in path.split(".") if part and not part.isdigit()]


def _fix(detail: ErrorDetails, path: str, root: type[BaseModel]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        if nearest := find_nearest_field(path, root):
            return f"did you mean {nearest}?"
        parent = path.rpartition(".")[0]
        section = find_section(parent, root) or root
        return f"known keys{f' of {parent}' if parent else ''}: {', '.join(section.model_fields)}"
    if kind == "missing":
        return _suggest_addition(path, root)
    if kind == "literal_error" and isinstance(value, str):
        choices = detail["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        close = difflib.get_close_matches(value[:_LONGEST_NAME], choices, n=1)
        return f"did you mean {close[0]!r}?" if close else _default(path, root)
    if kind in ("string_type", "path_type"):
        return "put it in quotes"
    if kind != "value_error" and isinstance(value, str) and _NUMBER_OR_BOOL.fullmatch(value):
        return "write it without quotes"
    return _default(path, root)


def _default(path: str, root: type[BaseModel]) -> str:
    """Return a hint with the default value, or "" if the field has no simple default."""
    info = find_field(path, root)
    is_plain = info is not None and isinstance(info.default, (str, int, float, tuple, Path))
    return f"the default is {json.dumps(info.default, default=str)}" if info and is_plain else ""


def _suggest_addition(path: str, root: type[BaseModel]) -> str:
    section = find_section(path, root)
    if section is None:  # a field, not a section
        parent, _, name = path.rpartition(".")
        return f"add `{name} = ...` under [{parent}]"
    required = [name for name, info in section.model_fields.items() if info.is_required()]
    return f"add a table [{path}]" + (f" with {', '.join(required)}" if required else "")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model class in `Model`, `Model | None` or `tuple[Model, ...]`."""
    for option in (annotation, *typing.get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if inner := _model_in(info.annotation):
            yield from _paths(inner, f"{prefix}{name}.")
