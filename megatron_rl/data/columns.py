"""Rows of any shape, by the names of their columns: `data.columns`.

    question, answer    texts
    messages            a chat, [{"role": "user", "content": "1+1?"}, ...]; its last message from the user is the question, those before
                        are kept as they are, and what the assistant says after it is the gold answer, unless `answer` names a column

`reward_model.ground_truth` is the field ground_truth of the column reward_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.data import ColumnsConfig
from megatron_rl.data.formats import ProblemRow, RowError, is_blank, parse_level, read_text

_ROLES = ("system", "user", "assistant", "tool")


def read_columns(columns: ColumnsConfig, row: Mapping[str, Any]) -> ProblemRow:
    """Return question, gold answer, level and earlier messages of a row. Raise RowError for a column that is missing or holds no such
    thing, with the columns that are there."""
    level = parse_level(_find(row, columns.level, "level")) if columns.level else 0
    if columns.messages:
        history, question, reply = _split_chat(_find(row, columns.messages, "messages"), columns.messages)
    else:
        history, question, reply = (), read_text(_find(row, columns.question, "question"), columns.question), ""
    if not question.strip():
        raise RowError(f"the field {columns.messages or columns.question} is empty")
    if columns.answer:
        answer = _find(row, columns.answer, "answer")
        reply = "" if is_blank(answer) else read_text(answer, columns.answer, numbers=True)
    return ProblemRow(question, reply.strip(), level, history)


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


def _split_chat(messages: Any, name: str) -> tuple[tuple[tuple[str, str], ...], str, str]:
    """Return the messages before the last of the user as (role, content), that one's content, and what the assistant says after it."""
    if not isinstance(messages, list) or not messages:
        shape = '[{"role": "user", "content": "..."}]'
        raise RowError(f"the field {name} must be a list of messages {shape}, not {type(messages).__name__}")
    chat = [_read_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]
    reply = chat.pop()[1] if chat[-1][0] == "assistant" else ""
    if not chat or chat[-1][0] != "user":
        roles = ", ".join(message["role"] for message in messages)
        raise RowError(f"the field {name} must end with the user's message, or with the assistant's after it; its roles are {roles}")
    return tuple(chat[:-1]), chat[-1][1], reply


def _read_message(message: Any, place: str) -> tuple[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        found = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        fix = "use a function of your own as data.format, see docs/guides/data.md"
        raise RowError(f"the field {place} must have role and content, found {found}", fix)
    if message["role"] not in _ROLES:
        raise RowError(f"the field {place}.role must be one of {', '.join(_ROLES)}, not {message['role']!r:.40}")
    return message["role"], read_text(message["content"], f"{place}.content")
