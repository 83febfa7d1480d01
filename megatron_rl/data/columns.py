"""Columns of rows, kept for judges without a Python dict per sample.

A `RowColumns` is a reference to a row, which is decoded at each access, and costs 80 bytes. The rows themselves cost:

    JSON and JSONL files    their JSON text, in one buffer, and 8 bytes per row
    Parquet files           their Arrow table
    hub data sets           nothing: `datasets` maps its cache file into memory
    a custom source         its own objects; a copy of the mapping of each row

`data.keep_columns` reduces this to some columns. Pickling a `RowColumns` gives a plain dict, so workers get one.
"""

import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Rows(Protocol):
    """Random access to rows by index, from 0."""

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class RowColumns(Mapping[str, Any]):
    """The columns of row `index`. Two of them are equal if their columns are."""

    __slots__ = ("_index", "_rows")

    def __init__(self, rows: Rows, index: int) -> None:
        self._rows, self._index = rows, index

    def __getitem__(self, name: str) -> Any:
        return self._rows[self._index][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows[self._index])

    def __len__(self) -> int:
        return len(self._rows[self._index])

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self._rows[self._index]),)


class JsonRows:
    """Rows as JSON text."""

    def __init__(self) -> None:
        self._text, self._ends = bytearray(), array("q", [0])

    def append(self, row: Mapping[str, Any]) -> RowColumns:
        """Add a row of JSON values, and return its columns."""
        self._text += json.dumps(row).encode()
        self._ends.append(len(self._text))
        return RowColumns(self, len(self._ends) - 2)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = json.loads(self._text[self._ends[index] : self._ends[index + 1]])
        return row


class ArrowRows:
    """Rows of a `pyarrow.Table`."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        (row,) = self._table.slice(index, 1).to_pylist()
        result: Mapping[str, Any] = row
        return result
