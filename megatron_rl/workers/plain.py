"""JSON for tasks of workers that keeps the types of a data set's values. A value that JSON lacks is an object with one key, which begins
with a mark and names its type. Reading it runs no code, unlike reading a pickle."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

_MARK = "\0"
_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda value: f"{value.days} {value.seconds} {value.microseconds}", lambda text: timedelta(*map(int, text.split()))),
    Decimal: (str, Decimal),
    UUID: (str, UUID),
}


def dump(value: object) -> bytes:
    """Return a value as JSON: JSON's own types, tuples, the types of `_TEXTS`, NumPy's arrays and numbers, and dataclasses of these. Raise
    TypeError for other types."""
    return json.dumps(_to_json(value)).encode()


def load(text: bytes, classes: Sequence[type] = ()) -> Any:
    """Return what `dump` was given. `classes` are the dataclasses that the value may contain."""
    return json.loads(text, object_hook=lambda each: _from_json(each, classes))


def _to_json(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_to_json(item) for item in value]
    if kind is tuple:
        return {f"{_MARK}tuple": [_to_json(item) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
            return {key: _to_json(item) for key, item in value.items()}
        return {f"{_MARK}dict": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if (base := kind if kind in _TEXTS else next((each for each in _TEXTS if isinstance(value, each)), None)) is not None:
        write, read = _TEXTS[base]
        if base is not kind and read(write(value)) != value:  # a pandas Timestamp with nanoseconds
            raise TypeError(f"{value!r:.80} is more than a {base.__name__}")
        return {_MARK + base.__name__: write(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {_MARK + kind.__name__: {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}}
    if hasattr(value, "dtype") and value.dtype.kind in "biufcSUMm":  # NumPy; a worker that gets none does not load it
        return {f"{_MARK}numpy": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, str | int | float):  # of a class of their own, which the worker need not know
        return value
    raise TypeError(f"{kind.__name__} cannot be sent to a worker")


def _from_json(value: dict[str, Any], classes: Sequence[type]) -> Any:
    if len(value) != 1 or not (key := next(iter(value))).startswith(_MARK):
        return value
    name, content = key.removeprefix(_MARK), value[key]
    if name == "tuple":
        return tuple(content)
    if name == "dict":
        return dict(content)
    if name == "numpy":
        import numpy as np

        dtype, shape, data = content
        array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
        return array if shape else array[()]
    for kind, (_, read) in _TEXTS.items():
        if kind.__name__ == name:
            return read(content)
    for each in classes:
        if each.__name__ == name:
            return each(**content)
    raise ValueError(f"{name!r} is no type of a task's values")
