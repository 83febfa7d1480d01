"""The rules of resumed runs, as the configuration's fields state them (`config.change`)."""

import typing
from collections.abc import Iterator

from pydantic import BaseModel

from megatron_rl.config import Config
from megatron_rl.config.change import Change


def _list_fields(model: type[BaseModel], prefix: str = "", inherited: Change | None = None) -> Iterator[tuple[str, Change]]:
    """Yield the path of every field that holds values, in nested tables too, with its rule: its own, or that of its section, or that of
    the field which holds the section."""
    inherited = getattr(model, "on_resume", None) or inherited
    for name, info in model.model_fields.items():
        own = next((each for each in info.metadata if isinstance(each, Change)), inherited)
        options = (info.annotation, *typing.get_args(info.annotation))
        options += tuple(item for option in options for item in typing.get_args(option))
        inner = [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]
        if inner:
            yield from _list_fields(inner[0], f"{prefix}{name}.", own)
        else:
            assert own is not None, f"{prefix}{name} has no rule"
            yield prefix + name, own


CHANGES = dict(_list_fields(Config))
"""The rule of each field. Indices into lists are left out: `data.train.source`."""


def find_change(field: str) -> Change | None:
    """Return the rule of a field, given with or without indices into lists and keys of a table such as `rollout.sglang`. None if it is
    unknown."""
    parts = [part for part in field.split(".") if not part.isdigit()]
    return next((rule for end in range(len(parts), 0, -1) if (rule := CHANGES.get(".".join(parts[:end])))), None)


def is_named(field: str, allowed: tuple[str, ...]) -> bool:
    """Return whether `allowed` has the field, or the table that it is in."""
    path = ".".join(part for part in field.split(".") if not part.isdigit())
    return any(path == name or path.startswith(f"{name}.") for name in allowed)
