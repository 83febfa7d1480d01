"""One set of problems, wherever its rows come from: `read_problem_set` is what preflight checks and what the loop then loads."""

from __future__ import annotations

import logging
from pathlib import Path

from megatron_rl.config.data import HUB_PREFIX, DataSourceConfig, FormatName
from megatron_rl.data.files import SOURCE_FIX, read_file_rows
from megatron_rl.data.formats import RowError, missing_format_error, read_row
from megatron_rl.data.hub import read_hub_rows
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

_log = logging.getLogger(__name__)


def read_problem_set(source: DataSourceConfig, default_format: FormatName | None, field: str, quiet: bool = False) -> list[Problem]:
    """Return the problems of a file or hub data set in their order; `prompt` is the bare question, `source` the set's label.

    `default_format` applies where `source` names none; `field` is the configuration field that named the set. Rows without a gold answer
    are left out, counted and, unless `quiet`, logged. Raise UserError for what cannot be read, a malformed row (with its number), a format
    that is missing or does not fit (with the columns found and what fits), and a set without problems.
    """
    format, location = source.format or default_format, source.source
    rows = read_hub_rows(location, field) if location.startswith(HUB_PREFIX) else read_file_rows(Path(location), field)
    problems, unanswered = [], []
    for number, content in rows:
        try:
            if format is None:
                raise missing_format_error(content)
            row = read_row(content, format)
        except RowError as error:
            raise UserError(field, f"{location}:{number}", error.rule, error.fix) from None
        if row.gold:
            problems.append(Problem(f"{source.label}:{number}", row.question, row.gold, row.level, source.label))
        else:
            unanswered.append(number)
    if not problems:
        raise UserError(field, location, "holds no problems" + (" with a gold answer" if unanswered else ""), SOURCE_FIX)
    if unanswered and not quiet:
        _log.warning("%s = %s: left out %d rows without a gold answer, the first is %d", field, location, len(unanswered), unanswered[0])
    return problems
