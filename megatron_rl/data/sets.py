"""Reads one set of problems from any source, by a format or by column names."""

import logging
from collections.abc import Container, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.data import ColumnsConfig, DataConfig, DataSourceConfig
from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.data.chat import check_own_chat, read_tools, split_chat
from megatron_rl.data.files import SOURCE_FIX, read_file_rows, read_hub_rows
from megatron_rl.data.formats import (
    KNOWN_COLUMNS,
    ProblemRow,
    RowError,
    RowReader,
    is_blank,
    parse_level,
    read_pass_rate,
    read_row,
    read_text,
)
from megatron_rl.data.own_source import read_own_rows
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.plugs import DATA_FORMATS
from megatron_rl.types import Problem

_log = logging.getLogger(__name__)


def read_problem_set(source: DataSourceConfig, data: DataConfig, field: str, quiet: bool = False) -> list[Problem]:
    """Return the problems of a set in their order. `prompt` is the bare question, and `source` the label of the set.

    Rows without a gold answer are dropped; their number is logged unless `quiet`.

    Args:
        data: provides the format or columns, and the settings, that `source` does not set.
        field: configuration field that named the set.

    Raises:
        UserError: The source cannot be read, a row is malformed, the format or columns are missing or do not match, or no problem is left.
    """
    location, (format, reader, needed) = source.source, _find_reader(source, data)
    problems, unanswered = [], []
    for number, content in _read_rows(source, data, field, needed):
        try:
            row = read_row(content, format, reader)
            if (row.history or row.tools) and not data.chat:
                rule = "has tools or messages before the question, which only a chat template can represent"
                raise RowError(rule, "set data.chat = true")
            if format not in {*DATA_FORMATS.builtin, "columns"}:
                check_own_chat(row.history, row.tools)
        except RowError as error:
            raise UserError(field, f"{location}:{number}", error.rule, error.fix) from None
        if row.gold:
            optional = row.history, row.tools, row.pass_rate
            problems.append(Problem(f"{source.label}:{number}", row.question, row.gold, row.level, source.label, *optional))
        else:
            unanswered.append(number)
    if not problems:
        raise UserError(field, location, "contains no problems" + (" with a gold answer" if unanswered else ""), SOURCE_FIX)
    if unanswered and not quiet:
        _log.warning("%s = %s: dropped %d rows without a gold answer, first row %d", field, location, len(unanswered), unanswered[0])
    return problems


def _find_reader(source: DataSourceConfig, data: DataConfig) -> tuple[str | None, RowReader | None, Container[str] | None]:
    """Return the name of the format, its reader (None without a format), and the columns it needs (None for all)."""
    has_own = source.format or source.columns
    format, columns = (source.format, source.columns) if has_own else (data.format, data.columns)
    if columns is not None:
        return "columns", partial(read_columns, columns), columns.needed
    with as_user_error():
        return format, DATA_FORMATS.load(format) if format else None, KNOWN_COLUMNS if format in DATA_FORMATS.builtin else None


def _read_rows(source: DataSourceConfig, data: DataConfig, field: str, needed: Container[str] | None) -> Iterator[tuple[int, object]]:
    if source.is_own:
        return read_own_rows(source, data, field)
    if source.source.startswith(HUB_PREFIX):
        return read_hub_rows(source.source, field, needed)
    return read_file_rows(Path(source.source), field, needed)


def read_columns(columns: ColumnsConfig, row: Mapping[str, Any]) -> ProblemRow:
    """Return the contents of a row by column names. Raise RowError if a column is missing or has the wrong type."""
    level = parse_level(_find(row, columns.level, "level")) if columns.level else 0
    pass_rate = read_pass_rate(_find(row, columns.pass_rate, "pass_rate"), columns.pass_rate) if columns.pass_rate else None
    tools = read_tools(_find(row, columns.tools, "tools"), columns.tools) if columns.tools else ()
    if columns.messages:
        history, question, reply = split_chat(_find(row, columns.messages, "messages"), columns.messages, tools if columns.tools else None)
    else:
        history, question, reply = (), read_text(_find(row, columns.question, "question"), columns.question), ""
    if not question.strip():
        raise RowError(f"the field {columns.messages or columns.question} is empty")
    if columns.answer:
        answer = _find(row, columns.answer, "answer")
        reply = "" if is_blank(answer) else read_text(answer, columns.answer, numbers=True)
    return ProblemRow(question, reply.strip(), level, history, tools, pass_rate)


def _find(row: Mapping[str, Any], name: str, field: str) -> Any:
    """Return the value of a column. `a.b` is the field b of the column a."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            inner = {column: content if isinstance(content, Mapping) else {} for column, content in row.items()}
            paths = [path for column, keys in inner.items() for path in ([f"{column}.{key}" for key in keys] or [str(column)])]
            raise RowError(f"has no field {name}, found {', '.join(paths) or 'none'}", f"set data.columns.{field} to one of them")
        value = value[part]
    return value
