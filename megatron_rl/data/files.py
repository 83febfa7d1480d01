"""Rows of a local file or of a Hugging Face hub data set, numbered from 1.

Files are JSONL (one object per line), JSON (one array of objects) or Parquet, recognized by name and first character. Hub data sets use
`datasets`, as `hf:OWNER/NAME[@REVISION][:CONFIG]:SPLIT`. Downloads are cached (HF_HOME, HF_DATASETS_CACHE) and then need no network
(HF_HUB_OFFLINE=1). The folder of a local clone can replace OWNER/NAME. Data sets that run code are refused.
"""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.data.formats import RowError, parse_json
from megatron_rl.errors import UserError

SOURCE_FIX = "use a JSONL, JSON or Parquet file, a hub data set as hf:OWNER/NAME:SPLIT, or your own source as module:attribute"


def read_file_rows(path: Path, field: str, columns: Container[str] | None) -> Iterator[tuple[int, object]]:
    """Yield (number, decoded row) for each row in file order. In JSONL, the number is the line's; blank lines are skipped.

    Args:
        field: configuration field that named the file.
        columns: columns to read, or None for all.

    Raises:
        UserError: The file is missing or unreadable, or a row is not JSON.
    """
    if not path.is_file():
        raise UserError(field, str(path), "is a folder" if path.is_dir() else "does not exist", SOURCE_FIX)
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet_rows(path, field, columns)
            return
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read ({error.strerror or error})", SOURCE_FIX) from None
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


def _read_parquet_rows(path: Path, field: str, columns: Container[str] | None) -> Iterator[tuple[int, object]]:
    """Yield the first row with all columns, so that an error can list them, and the other rows with `columns`: solutions can be long."""
    import pyarrow.lib  # takes tens of milliseconds, and most runs read no Parquet
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        rows = file.read(columns=[name for name in file.schema_arrow.names if columns is None or name in columns]).to_pylist()
        rows[:1] = next(file.iter_batches(batch_size=1)).to_pylist() if rows else []
    except pyarrow.lib.ArrowException as error:
        reason = str(error).splitlines()[0][:200]
        raise UserError(field, str(path), f"is not a readable Parquet file ({reason})", SOURCE_FIX) from None
    yield from enumerate(rows, start=1)


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(f"is not UTF-8 (byte {error.start + 1})") from None


def read_hub_rows(source: str, field: str, columns: Container[str] | None) -> Iterator[tuple[int, object]]:
    """Yield (number, row) for each row of the split: the first with all columns, the others with `columns`, or all columns if None.

    Raise UserError if the name is malformed or the data set, configuration or split cannot be loaded.
    """
    name, *rest = source.removeprefix(HUB_PREFIX).split(":")
    if not name or len(rest) not in (1, 2) or not all(rest):
        rule = "is not of the form hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT"
        raise UserError(field, source, rule, "write for example hf:openai/gsm8k:main:train")
    data_set = _load_data_set(source, name, rest[0] if len(rest) == 2 else None, rest[-1], field)
    narrow = data_set.select_columns([name for name in data_set.column_names if columns is None or name in columns])
    for number, row in enumerate(narrow, start=1):
        yield number, data_set[0] if number == 1 else row


def _load_data_set(source: str, name: str, config: str | None, split: str, field: str) -> Any:
    import datasets  # takes seconds, and most runs do not need it
    from huggingface_hub.utils import logging

    datasets.disable_progress_bars()
    logging.set_verbosity_error()  # otherwise each retry prints a line
    try:
        repository, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
        return datasets.load_dataset(repository, config, split=split, revision=revision or None)
    except Exception as error:  # OSError, ValueError, and errors of `datasets` and of the hub client
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        fix = "check the name and the network, or use the path of a downloaded Parquet file"
        raise UserError(field, source, f"cannot be loaded ({reason})", fix) from error
