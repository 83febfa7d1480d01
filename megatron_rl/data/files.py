"""Rows of local files or of a Hugging Face hub data set, numbered from 1.

Files are JSONL (one object per line), JSON (one array of objects) or Parquet, recognized by name and first character. JSON may be
compressed (.gz, .zst). A folder or a pattern names several files, in the order of their names. Hub data sets use `datasets`, as
`hf:OWNER/NAME[@REVISION][:CONFIG]:SPLIT`. Downloads are cached (HF_HOME, HF_DATASETS_CACHE) and then need no network
(HF_HUB_OFFLINE=1). The folder of a local clone can replace OWNER/NAME. Data sets that run code are refused.
"""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.config.hub import HUB_PREFIX, SPLIT_COLON
from megatron_rl.data.columns import ArrowRows, JsonRows, RowColumns
from megatron_rl.data.formats import RowError, parse_json
from megatron_rl.errors import UserError

SOURCE_FIX = "use a JSONL, JSON or Parquet file, a hub data set as hf:OWNER/NAME:SPLIT, or your own source as module:attribute"
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_FILE = re.compile(r"^[^.].*\.(parquet|jsonl?(\.gz|\.zst)?)$")
_SHARD = re.compile(r"[-_.]?\d+(-of-\d+)?(?=\.(?:parquet|json))")
_DECODED_ROWS = 1024  # rows of a Parquet file that are decoded at once


Row = tuple[int, object, Mapping[str, Any]]
"""Number from 1, decoded row, and the columns of the row that are kept for judges."""


def read_file_rows(path: Path, field: str, keep: Sequence[str] | None) -> Iterator[Row]:
    """Yield the rows of a file, or of all files of a folder or a pattern, in order. In JSONL, the number is the line's; blank lines are
    skipped.

    Args:
        field: configuration field that named the file.
        keep: columns to keep for judges, or None for all.

    Raises:
        UserError: A file is missing or unreadable, a row is not JSON, or a folder holds several splits or lacks shards.
    """
    if os.path.isfile(path):
        yield from _read_rows(path, field, keep)
        return
    last = 0
    for file in _list_shards(path, field):
        before = last
        for number, row, kept in _read_rows(file, field, keep):
            last = before + number
            yield last, row, kept


def _list_shards(path: Path, field: str) -> list[Path]:
    """Return the files of a folder or a pattern. Raise UserError unless they are one split."""
    if not os.path.isdir(path):
        if not glob.has_magic(str(path)):
            raise UserError(field, str(path), "does not exist", SOURCE_FIX)
        if not (found := sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if os.path.isfile(file))):
            raise UserError(field, str(path), "is a pattern that matches no file", SOURCE_FIX)
        return found
    found = sorted(file for file in path.iterdir() if _FILE.search(file.name) and os.path.isfile(file))
    splits = {_SHARD.sub("", file.name) for file in found}
    if len(splits) != 1:
        rule = (
            f"is a folder with files of {len(splits)} sets ({', '.join(sorted(splits)[:4])})" if found else "is a folder without data files"
        )
        raise UserError(field, str(path), rule, f"name one file, or a pattern such as {path}/train-*.parquet" if found else SOURCE_FIX)
    wanted = re.search(r"-of-(\d+)", found[0].name)
    if wanted and int(wanted[1]) != len(found):
        raise UserError(field, str(path), f"is a folder with {len(found)} of {int(wanted[1])} shards", "complete it, or write a pattern")
    return found


def _read_rows(path: Path, field: str, keep: Sequence[str] | None) -> Iterator[Row]:
    """Yield the rows of one file."""
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet_rows(path, field, keep)
            return
        content = _read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    except (OSError, ValueError) as error:  # Arrow's own errors are ValueErrors
        raise UserError(field, str(path), f"cannot be read ({getattr(error, 'strerror', '') or error})", SOURCE_FIX) from None
    whole, path = path, path.with_suffix("") if path.suffix in _COMPRESSIONS else path
    if path.suffix not in (".json", ".jsonl") and content.lstrip()[:1] not in (b"", b"{", b"["):  # .csv, .xlsx
        raise UserError(field, str(whole), "is neither JSON nor Parquet", SOURCE_FIX)
    kept = JsonRows()
    for number, row in _parse_rows(content, path, field):
        yield number, row, kept.append(select_columns(row, keep)) if isinstance(row, Mapping) else {}


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed by its suffix. Raise OSError or ValueError."""
    if path.suffix not in _COMPRESSIONS:
        return path.read_bytes()
    import pyarrow

    with pyarrow.input_stream(str(path), compression=_COMPRESSIONS[path.suffix]) as stream:
        content: bytes = stream.read()
    return content


def select_columns(row: Mapping[str, Any], keep: Sequence[str] | None) -> Mapping[str, Any]:
    """Return the columns of a row that `data.keep_columns` names. Columns that the row does not have are left out."""
    return row if keep is None else {name: row[name] for name in keep if name in row}


def _parse_rows(content: bytes, path: Path, field: str) -> Iterator[tuple[int, object]]:
    if path.suffix == ".json" and content.lstrip()[:1] == b"[":
        try:
            rows = parse_json(_decode(content))
        except RowError as error:
            raise UserError(field, str(path), error.rule, "correct the file") from None
        yield from enumerate(rows, start=1)
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            if text := _decode(line).strip():
                yield number, parse_json(text)
        except RowError as error:
            raise UserError(field, f"{path}:{number}", error.rule, error.fix) from None


def _read_parquet_rows(path: Path, field: str, keep: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow.lib  # takes tens of milliseconds, and most runs read no Parquet
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us").read()
        names = table.column_names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(field, str(path), f"has several columns named {', '.join(repeated)}", "rename all but one of them")
        for name, type in _find_nanoseconds(table.schema).items():
            with _naming_column(name, str(path), field):
                table = table.set_column(names.index(name), name, table[name].cast(type))
        kept = ArrowRows(table if keep is None else table.select([name for name in names if name in keep]))
        rows = (row for batch in table.to_batches(max_chunksize=_DECODED_ROWS) for row in _decode_batch(batch, str(path), field))
        for number, row in enumerate(map(_FloatShortener(table.schema), rows), start=1):
            yield number, row, RowColumns(kept, number - 1)
    except pyarrow.lib.ArrowException as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(field, str(path), f"is not a readable Parquet file ({reason})", SOURCE_FIX) from None


def _decode_batch(batch: Any, source: str, field: str) -> list[dict[str, Any]]:
    """Return the rows of an Arrow batch. Raise UserError, naming the column, for a value that Python has not: a date of the year 10,000, or
    a text that is not UTF-8."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        with _naming_column(name, source, field):
            columns.append(column.to_pylist())
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


@contextmanager
def _naming_column(name: str, source: str, field: str) -> Iterator[None]:
    try:
        yield
    except (ArithmeticError, ValueError, LookupError) as error:  # Arrow's own errors are ValueErrors
        rule = f"column {name} holds values that cannot be read without loss ({str(error).splitlines()[0][:200]})"
        raise UserError(field, source, rule, "convert the column to text or remove it") from None


def _find_nanoseconds(schema: Any) -> dict[str, Any]:
    """Return the Arrow types, in microseconds, of the columns that hold times in nanoseconds, which Python's times do not have."""
    return {each.name: _in_microseconds(each.type) for each in schema if "[ns" in str(each.type)}


def _in_microseconds(type: Any) -> Any:
    """Return an Arrow type with microseconds instead of nanoseconds."""
    import pyarrow
    from pyarrow import types

    def convert(*fields: Any) -> list[Any]:
        return [field.with_type(_in_microseconds(field.type)) for field in fields]

    if types.is_timestamp(type):
        return pyarrow.timestamp("us", type.tz)
    if types.is_time64(type) or types.is_duration(type):
        return pyarrow.time64("us") if types.is_time64(type) else pyarrow.duration("us")
    if types.is_struct(type):
        return pyarrow.struct(convert(*type))
    if types.is_map(type):
        return pyarrow.map_(*convert(type.key_field, type.item_field))
    if types.is_fixed_size_list(type):
        return pyarrow.list_(*convert(type.value_field), type.list_size)
    if types.is_list(type) or types.is_large_list(type):
        return pyarrow.large_list(*convert(type.value_field))
    return _in_microseconds(type.value_type) if types.is_dictionary(type) else type


class _FloatShortener:
    """Returns a row with the shortest decimals that its 16-bit and 32-bit floats hold: 0.1, not 0.10000000149011612."""

    def __init__(self, schema: Any) -> None:
        """`schema`: Arrow schema of the rows."""
        self._columns = {each.name: each.type for each in schema if re.search(r"\b(float|halffloat)\b", str(each.type))}

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {name: _shorten(row[name], type) for name, type in self._columns.items()} if self._columns else row


def _shorten(value: Any, type: Any) -> Any:
    """`type`: Arrow type of the value."""
    if isinstance(value, float):
        narrow = {"float": np.float32, "halffloat": np.float16}.get(str(getattr(type, "value_type", type)))  # a dictionary has values
        return float(str(narrow(value))) if narrow else value
    if isinstance(value, dict):
        return {each.name: _shorten(value[each.name], each.type) for each in type}
    if isinstance(value, list) and hasattr(type, "value_type"):
        return [_shorten(item, type.value_type) for item in value]
    return value


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"is not UTF-8 (byte {error.start + 1})") from None


def read_hub_rows(source: str, field: str, keep: Sequence[str] | None) -> Iterator[Row]:
    """Yield the rows of a split. See `read_file_rows` for `keep`.

    Raise UserError if the name is malformed or the data set, configuration or split cannot be loaded.
    """
    name, *rest = SPLIT_COLON.split(source.removeprefix(HUB_PREFIX))
    if not name or len(rest) not in (1, 2) or not all(rest):
        rule = "is not of the form hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT"
        raise UserError(field, source, rule, "write for example hf:openai/gsm8k:main:train")
    data_set = _load_data_set(source, name, rest[0] if len(rest) == 2 else None, rest[-1], field)
    for name, type in _find_nanoseconds(data_set.features.arrow_schema).items():
        from datasets.features.features import generate_from_arrow_type

        with _naming_column(name, source, field):
            data_set = data_set.cast_column(name, generate_from_arrow_type(type))
    kept = data_set if keep is None else data_set.select_columns([name for name in data_set.column_names if name in keep])
    for number, row in enumerate(map(_FloatShortener(data_set.features.arrow_schema), data_set), start=1):
        yield number, row, RowColumns(kept, number - 1)


def _load_data_set(source: str, name: str, config: str | None, split: str, field: str) -> Any:
    import datasets  # takes seconds, and most runs do not need it
    from huggingface_hub.utils import logging

    datasets.disable_progress_bars()
    logging.set_verbosity_error()  # otherwise each retry prints a line
    try:
        repository, _, revision = (name, "", "") if os.path.isdir(name) else name.partition("@")
        return datasets.load_dataset(repository, config, split=split, revision=revision or None)
    except Exception as error:  # OSError, ValueError, and errors of `datasets` and of the hub client
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        fix = "check the name and the network, or use the path of a downloaded Parquet file"
        raise UserError(field, source, f"cannot be loaded ({reason})", fix) from error
