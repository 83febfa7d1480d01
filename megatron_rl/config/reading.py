"""Reading of what users, launchers, and disks give: files, JSON, patterns. All that reading can raise becomes one line, in this file.

with reading("CONFIG", str(path), "give a TOML file"):
    table = tomllib.loads(read_file(path).decode())
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from megatron_rl.errors import UserError, as_user_error

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""A number of things, in a file."""
READ_ERRORS = (OSError, ValueError, OverflowError, RecursionError, MemoryError, re.error)
"""What reading a file or parsing a text raises. ValueError includes texts that are not UTF-8, JSON, or TOML, and NUL in a path."""
MOST_BYTES = 64 << 20
"""Largest file that is read as a whole."""
_DEEPEST = 64
"""Largest depth of lists and objects in JSON that is read back."""
_LONGEST_NAME, _LONGEST_PATH = 255, 3072
"""Largest number of bytes of a file's name and of a path. Linux allows 4096 for a path, to which names of files are added."""


@contextmanager
def reading(field: str, value: object, fix: str = "") -> Iterator[None]:
    """Context manager that turns everything that reading `value` can raise into a UserError."""
    try:
        with as_user_error():
            yield
    except READ_ERRORS as error:
        raise UserError(field, value, describe_read_error(error), fix) from None


@contextmanager
def as_value_error() -> Iterator[None]:
    """Context manager for validators: turns everything that reading a value can raise into the ValueError that pydantic expects."""
    try:
        yield
    except READ_ERRORS as error:
        raise ValueError(describe_read_error(error)) from None


def describe_read_error(error: BaseException) -> str:
    """Return what is wrong with a value, for any of `READ_ERRORS`."""
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return "does not exist"
        case OSError():
            return f"cannot be read ({error.strerror or error})"
        case RecursionError():
            return "is nested too deeply"
        case OverflowError():
            return f"is out of range ({error})"
        case MemoryError():
            return "does not fit into memory"
        case UnicodeError():
            return "is not a UTF-8 text file" if isinstance(error, UnicodeDecodeError) else "is not valid text"
        case json.JSONDecodeError():
            return f"is not valid JSON ({error})"
        case re.error():
            return f"is not a valid regular expression ({error})"
        case _ if "integer string conversion" in str(error):
            return "has an integer of too many digits"
        case BadPathError():
            return str(error)
    return f"cannot be read ({error})"


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Unlike `open`, never wait for the writer of a pipe. Raise OSError, also for anything but a regular
    file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(None, "it is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file. Raise OSError, also if the file is larger than `most` bytes, and ValueError for a NUL in the
    path."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(None, f"it has more than {most:,} bytes")
    return data


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text, with None for NaN and infinite numbers. Raise ValueError, or RecursionError if it is nested too
    deeply for the code that reads it."""

    def parse_float(text: str) -> float | None:
        number = float(text)
        return number if math.isfinite(number) else None

    value = json.loads(data, parse_constant=lambda _: None, parse_float=parse_float)
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise RecursionError for a JSON value that is nested too deeply for code that walks through it."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for each in level if isinstance(each, dict | list) for item in (each.values() if isinstance(each, dict) else each)]
    if level:
        raise RecursionError


def keep_valid(kind: TypeAdapter[Any], value: Any) -> tuple[Any, list[str]]:
    """Return the parts of a JSON value that have the types of `kind`, and what was left out and why, or None if nothing can be kept."""
    left_out: list[str] = []
    while True:
        try:
            kind.validate_python(value, strict=True)
            return value, left_out
        except ValidationError as error:
            details = error.errors(include_input=False, include_context=False)
        wrong = {_find_part(value, detail["loc"]): detail["msg"].removeprefix("Value error, ") for detail in details}
        outer = [path for path in wrong if not any(path[:length] in wrong for length in range(len(path)))]
        left_out += [f"{'.'.join(map(str, path)) or 'all'} ({wrong[path]})" for path in outer]
        if () in outer:
            return None, left_out
        for *parents, last in reversed(outer):  # pydantic goes through lists in order, so an item is removed before those ahead of it
            part = value
            for key in parents:
                part = part[key]
            del part[last]


def _find_part(value: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the path of the innermost part of a value that a location of pydantic names; it may also name types and missing keys."""
    path: list[int | str] = []
    key: Any
    for key in location:
        if (isinstance(value, dict) and key in value) or (isinstance(value, list) and isinstance(key, int) and key < len(value)):
            value = value[key]
        else:
            break
        path.append(key)
    return tuple(path)


def parse_number(text: str, low: int, high: int) -> int | None:
    """Return the integer that a text holds, or None if it is not one from `low` to `high`. `str.isdigit` accepts more than `int` does."""
    text = text.strip()
    is_short = text.isascii() and text.isdecimal() and len(text) < 16
    return int(text) if is_short and low <= int(text) <= high else None


class BadPathError(ValueError):
    """Raised for a path that no file can have."""


def check_path(path: Path | str) -> None:
    """Raise BadPathError if no file can have this path. What passes can be looked up without an error about the name."""
    data = os.fsencode(path)
    if b"\0" in data:
        raise BadPathError("has a NUL character, which no path can have")
    if len(data) > _LONGEST_PATH or any(len(name) > _LONGEST_NAME for name in data.split(b"/")):
        raise BadPathError(f"is too long: a name has at most {_LONGEST_NAME} bytes, and a path {_LONGEST_PATH:,}")
