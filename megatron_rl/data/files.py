"""Rows of a local file: JSONL (one object per line), JSON (one array of objects) or Parquet, recognized by name and first character.

Each row comes with its number from 1, of the line in JSONL and of the row elsewhere, so that every error names file and number.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import Path

from megatron_rl.data.formats import RowError
from megatron_rl.errors import UserError

SOURCE_FIX = "give a JSONL, JSON or Parquet file, hf:OWNER/NAME:SPLIT for one on the hub, or your own as module:attribute"


def read_file_rows(path: Path, field: str, columns: Container[str] | None) -> Iterator[tuple[int, object]]:
    """Yield (number, decoded row) of every row in file order; blank lines are skipped.

    `field` is the configuration field that named the file; `columns` are those that are needed, None for all. Raise UserError for a
    missing or unreadable file, and for a row that is not JSON, with its number.
    """
    if not path.is_file():
        raise UserError(field, str(path), "is a folder" if path.is_dir() else "does not exist", SOURCE_FIX)
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path, field, columns)
            return
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read ({error.strerror or error})", SOURCE_FIX) from None
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        yield from _array_rows(content, path, field)
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            if text := _decoded(line).strip():
                yield number, _json(text)
        except RowError as error:
            raise UserError(field, f"{path}:{number}", error.rule, error.fix) from None


def _array_rows(content: bytes, path: Path, field: str) -> Iterator[tuple[int, object]]:
    try:
        rows = _json(_decoded(content))
    except RowError as error:
        raise UserError(field, str(path), error.rule, "correct the file") from None
    assert isinstance(rows, list)  # it starts with a bracket
    yield from enumerate(rows, start=1)


def _parquet_rows(path: Path, field: str, columns: Container[str] | None) -> Iterator[tuple[int, object]]:
    """Yield the first row whole, so that an error can name all columns, and of the others `columns`: worked solutions are long."""
    import pyarrow.lib  # tens of milliseconds, and most runs read no Parquet
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        rows = file.read(columns=[name for name in file.schema_arrow.names if columns is None or name in columns]).to_pylist()
        rows[:1] = next(file.iter_batches(batch_size=1)).to_pylist() if rows else []
    except pyarrow.lib.ArrowException as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(field, str(path), f"is not a Parquet file that can be read ({reason})", SOURCE_FIX) from None
    yield from enumerate(rows, start=1)


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"is not UTF-8 (byte {error.start + 1})") from None


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"is not JSON ({error})") from None
