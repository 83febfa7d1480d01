"""Rows of any shape, by the names of their columns: `data.columns`.

    question, answer    texts
    messages            a chat, [{"role": "user", "content": "1+1?"}, ...]; its last message from the user is the question, those before
                        are kept as they are, and what the assistant says after it is the gold answer, unless `answer` names a column
    tools               that the chat template tells the policy of (`chat`)

`reward_model.ground_truth` is the field ground_truth of the column reward_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.data import ColumnsConfig
from megatron_rl.data.chat import read_tools, split_chat
from megatron_rl.data.formats import ProblemRow, RowError, is_blank, parse_level, read_pass_rate, read_text


def read_columns(columns: ColumnsConfig, row: Mapping[str, Any]) -> ProblemRow:
    """Return question, gold answer, level, earlier messages and tools of a row. Raise RowError for a column that is missing or holds no
    such thing, with the columns that are there."""
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
    """Return the value of a column, `a.b` for the field b of the column a."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise RowError(f"has no field {name}, found {', '.join(_list_fields(row))}", f"set data.columns.{field} to one of them")
        value = value[part]
    return value


def _list_fields(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns, and of the fields in them."""
    inner = {name: value if isinstance(value, Mapping) else {} for name, value in row.items()}
    return [path for name, fields in inner.items() for path in ([f"{name}.{field}" for field in fields] or [str(name)])] or ["none"]
