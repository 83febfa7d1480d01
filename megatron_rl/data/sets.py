"""One set of problems, wherever its rows come from: `read_problem_set` is what preflight checks and what the loop then loads."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from functools import partial
from pathlib import Path

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.data.chat import check_own_chat
from megatron_rl.data.columns import read_columns
from megatron_rl.data.files import SOURCE_FIX, read_file_rows
from megatron_rl.data.formats import KNOWN_COLUMNS, RowError, RowReader, read_row
from megatron_rl.data.hub import read_hub_rows
from megatron_rl.data.own_source import read_own_rows
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.plugs import DATA_FORMATS
from megatron_rl.types import Problem

_log = logging.getLogger(__name__)


def read_problem_set(source: DataSourceConfig, data: DataConfig, field: str, quiet: bool = False) -> list[Problem]:
    """Return the problems of a file, hub data set or function of rows in their order; `prompt` is the bare question, `source` the label.

    `data.format` or `data.columns`, and `data.settings`, apply where `source` names none; `field` is the configuration field that named the
    set. Rows without a gold answer are left out, counted and, unless `quiet`, logged. Raise UserError for what cannot be read, a malformed
    row (with its number), a format or columns that are missing or do not fit (with the columns found and what fits), and a set without
    problems.
    """
    location, (format, reader, needed) = source.source, _find_reader(source, data)
    problems, unanswered = [], []
    for number, content in _read_rows(source, data, field, needed):
        try:
            row = read_row(content, format, reader)
            if (row.history or row.tools) and not data.chat:
                raise RowError(
                    "has tools or messages before the question, which only a chat template has a place for", "set data.chat = true"
                )
            if format not in {*DATA_FORMATS.builtin, "columns"}:
                check_own_chat(row.history, row.tools)
        except RowError as error:
            raise UserError(field, f"{location}:{number}", error.rule, error.fix) from None
        if row.gold:
            optional = row.history, row.tools, row.pass_rate
            problem = Problem(f"{source.label}:{number}", row.question, row.gold, row.level, source.label, *optional)
            problems.append(problem)
        else:
            unanswered.append(number)
    if not problems:
        raise UserError(field, location, "holds no problems" + (" with a gold answer" if unanswered else ""), SOURCE_FIX)
    if unanswered and not quiet:
        _log.warning("%s = %s: left out %d rows without a gold answer, the first is %d", field, location, len(unanswered), unanswered[0])
    return problems


def _find_reader(source: DataSourceConfig, data: DataConfig) -> tuple[str | None, RowReader | None, Container[str] | None]:
    """Return the format's name, what reads its rows (None for no format), and the columns it needs (None for all)."""
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
