"""Loading of a configuration from TOML and command-line overrides."""

import json
import re
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megatron_rl.config.base import flatten
from megatron_rl.config.errors import find_field, to_user_error
from megatron_rl.config.reading import read_file, reading
from megatron_rl.config.run import Config
from megatron_rl.errors import UserError
from megatron_rl.redaction import MASK, find_secret, hold_variable, redact

_EXAMPLE = "give a TOML file such as configs/quickstart.toml"
ConfigT = TypeVar("ConfigT", bound=Config)

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_SECRET_FIX = "put the secret in an environment variable; reward servers have `token_env`, and your own code can read its environment"


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    root: type[ConfigT] = Config,  # type: ignore[assignment]
    more: Path | None = None,
) -> ConfigT:
    """Read a TOML file, apply `--section.key=value` overrides, and validate the result.

    Relative paths in the file are relative to the working directory. `root` may be a configuration with additional sections, and `more` a
    second file with these sections. Raise UserError if the file cannot be read, is not valid TOML, contains a secret, or has unknown keys
    or bad values, of which each is one line of the error.
    """
    table = _read_toml(path) | (_read_toml(more) if more else {})
    with reading("CONFIG", str(path), _EXAMPLE):
        return make_config(table, overrides, root)


def make_config(table: dict[str, Any], overrides: Sequence[str], root: type[ConfigT] = Config) -> ConfigT:  # type: ignore[assignment]
    """Apply overrides to the sections of a configuration and validate the result. Raise UserError as `load_config` does."""
    table = apply_overrides(table, overrides)
    _refuse_secrets(table)
    for field, value in flatten(table).items():
        if value == "" and (info := find_field(field, root)) and Path in (info.annotation, *typing.get_args(info.annotation)):
            raise UserError(field, value, "is empty", "name a file or folder, or `.` for the working folder")
    try:  # from JSON even a strict model accepts a string as Path and a list as tuple
        return root.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise to_user_error(error, root) from None


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of `table` with `--section.key=value` or `--section.key value` applied. A value that is not TOML is a plain string.
    Example: ``apply_overrides({}, ["--train.steps=3", "--log.dir", "a"])`` gives ``{"train": {"steps": 3}, "log": {"dir": "a"}}``."""
    result = json.loads(json.dumps(table, default=str))
    for path, text in _pairs(overrides):
        *sections, key = path.split(".")
        target = result
        for depth, section in enumerate(sections, 1):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(f"--{path}", text, f"{'.'.join(sections[:depth])} is a value, not a section")
        target[key] = _override_value(path, text)
    return result


def _refuse_secrets(table: dict[str, Any]) -> None:
    """Raise UserError for a value that contains a secret, because a run writes its configuration. Mask the environment variables that
    options `*_env` name from now on."""
    for field, value in flatten(table).items():
        name = field.rpartition(".")[2]
        if name.endswith("_env") and isinstance(value, str) and value:
            if not _VARIABLE.fullmatch(value):  # it may be the secret itself
                rule = "must be the name of an environment variable, in capital letters"
                raise UserError(field, MASK, rule, f'export SECRET=..., and write {name} = "SECRET"')
            hold_variable(value)
        elif secret := find_secret(name, value):
            shown = redact(value) if isinstance(value, str) else value
            rule = f"{secret}, and a run writes its configuration to its folder"
            raise UserError(field, MASK if shown == value else shown, rule, _SECRET_FIX)


def _read_toml(path: Path) -> dict[str, Any]:
    with reading("CONFIG", str(path), _EXAMPLE):
        text = read_file(path).decode("utf-8-sig")
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message = str(error)
            position = re.search(r" \(at line (\d+), column (\d+)\)$", message)
            line = int(position[1]) if position else text.count("\n") + 1  # "at end of document" has no line number
            rule = f"not valid TOML: {message[: position.start()] if position else message}"
            raise UserError(f"{path}, line {line}", None, rule) from None


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(overrides)
    for word in words:
        path, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not all(path.split(".")):
            raise UserError("override", word, "is not of the form --section.key=value")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UserError(f"--{path}", None, "has no value", f"write --{path}=VALUE")
        with reading(f"--{path}", value):
            f"{path}{value}".encode()  # an argument that is not UTF-8 has surrogates
        yield path, value


def _override_value(path: str, text: str) -> Any:
    with reading(f"--{path}", text):
        try:
            parsed = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            return text
    if len(parsed) > 1 or (not isinstance(parsed["value"], str) and _is_text(path)):
        return text  # --log.dir=2026 is a folder although it parses as a number
    return parsed["value"]


def _is_text(path: str) -> bool:
    info = find_field(path, Config)
    annotation = info.annotation if info else None
    return typing.get_origin(annotation) is not dict and bool({str, Path} & {annotation, *typing.get_args(annotation)})
