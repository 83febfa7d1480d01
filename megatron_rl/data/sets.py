"""Reads one set of problems from any source, by a format or by column names."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.data import ColumnsConfig, DataConfig, DataSourceConfig
from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.data.chat import check_own_chat, read_tools, say_dropped, split_chat
from megatron_rl.data.files import SOURCE_FIX, Row, read_file_rows, read_hub_rows, select_columns
from megatron_rl.data.formats import (
    ProblemRow,
    RowError,
    RowReader,
    check_columns,
    is_blank,
    parse_level,
    read_answer,
    read_pass_rate,
    read_row,
    read_text,
)
from megatron_rl.data.own_source import read_own_rows
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.plugs import DATA_FORMATS
from megatron_rl.types import Problem, as_json


class ProblemSet(NamedTuple):
    """The problems of a set in their order. `prompt` is the bare question, and `source` the label of the set."""

    problems: list[Problem]
    keys: list[bytes]  # `make_key` of each problem
    unanswered: list[int]  # numbers of the rows without a gold answer, which are left out


def read_set(source: DataSourceConfig, data: DataConfig, field: str) -> ProblemSet:
    """Read a set.

    Args:
        data: provides the format or columns, the settings, and the columns to keep that `source` does not set.
        field: configuration field that named the set.

    Raises:
        UserError: The source cannot be read, a row is malformed, the format or columns are missing or do not match, or no problem is left.
    """
    location, label, (format, reader) = source.source, source.label, _find_reader(source, data)
    found, keep = ProblemSet([], [], []), _find_kept(source, data)
    for number, content, columns in _read_rows(source, data, field):
        try:
            row = read_row(content, format, reader)
            if (row.history or row.tools) and not data.chat:
                rule = "has tools or messages before the question, which only a chat template can represent"
                raise RowError(rule, "set data.chat = true")
            if format not in {*DATA_FORMATS.builtin, "columns"}:
                check_own_chat(row.history, row.tools)
            if not row.gold:
                found.unanswered.append(number)
                continue
            optional = row.history, row.tools, row.pass_rate, columns
            problem = Problem(f"{label}:{number}", row.question, row.gold, row.level, label, *optional)
            assert isinstance(content, Mapping)  # otherwise `read_row` has raised
            check_columns(kept := select_columns(content, keep))
            found.keys.append(make_key(problem, kept))
            found.problems.append(problem)
        except RowError as error:
            raise UserError(field, f"{location}:{number}", error.rule, error.fix) from None
    if not found.problems:
        raise UserError(field, location, "contains no problems" + (" with a gold answer" if found.unanswered else ""), SOURCE_FIX)
    return found


def make_key(problem: Problem, columns: Mapping[str, Any]) -> bytes:
    """Return a digest of everything about a problem that reaches policy and judge, except the name of its set. Equal rows have equal keys.

    `columns`: those of the problem, decoded. Raise RowError if a column holds objects that are not data.
    """
    return _digest(problem.prompt, problem.history, problem.tools, problem.answer, columns)


def make_question_key(problem: Problem, replaces_system: bool) -> bytes:
    """Return a digest of the question as asked: with its tools and the messages before it, letter by letter.

    `replaces_system`: whether another system message replaces that of the row.
    """
    history = problem.history[replaces_system and bool(problem.history) and problem.history[0]["role"] == "system" :]
    return _digest(problem.prompt, history, problem.tools)


def _digest(*parts: object) -> bytes:
    try:
        text = json.dumps(parts, sort_keys=True, default=as_json)
    except (TypeError, ValueError) as error:
        raise RowError(f"has a column that is not data ({error})", "leave it out by data.keep_columns") from None
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _find_reader(source: DataSourceConfig, data: DataConfig) -> tuple[str | None, RowReader | None]:
    """Return the name of the format and its reader, or None without a format."""
    has_own = source.format or source.columns
    format, columns = (source.format, source.columns) if has_own else (data.format, data.columns)
    if columns is not None:
        return "columns", partial(read_columns, columns)
    with as_user_error():
        return format, DATA_FORMATS.load(format) if format else None


def _find_kept(source: DataSourceConfig, data: DataConfig) -> tuple[str, ...] | None:
    return data.keep_columns if source.keep_columns is None else source.keep_columns


def _read_rows(source: DataSourceConfig, data: DataConfig, field: str) -> Iterator[Row]:
    keep = _find_kept(source, data)
    if source.is_own:
        rows = read_own_rows(source, data, field)
        return ((number, row, select_columns(row, keep) if isinstance(row, Mapping) else {}) for number, row in rows)
    if source.source.startswith(HUB_PREFIX):
        return read_hub_rows(source.source, field, keep)
    return read_file_rows(Path(source.source), field, keep)


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
        say_dropped(reply, columns.messages)
        answer = _find(row, columns.answer, "answer")
        reply = "" if is_blank(answer) else read_answer(answer, columns.answer, structured=True)
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
