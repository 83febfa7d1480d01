"""The messages and tools of a row, in the form that chat templates take, checked.

    messages    [{"role": "user", "content": "1+1?"}, ...]; an assistant's may have tool_calls, a tool's tool_call_id and name
    tools       [{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}, ...]

Tools and a call's arguments may be JSON texts, which are taken as they are. In others a field that is null is no field: Parquet fills the
fields that other rows have with null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megatron_rl.data.formats import RowError, read_text
from megatron_rl.types import ChatMessage

_ROLES = ("system", "user", "assistant", "tool")
_TEXTS = ("reasoning_content", "name", "tool_call_id")
"""Fields of a message that chat templates know beside role, content and tool_calls."""


def split_chat(messages: Any, name: str, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[tuple[ChatMessage, ...], str, str]:
    """Return the messages before the last of the user, that one's content, and what the assistant says after it.

    `name` is the column; calls must be of `tools`, if given. Raise RowError for messages that are malformed.
    """
    if not isinstance(messages, list) or not messages:
        shape = '[{"role": "user", "content": "..."}]'
        raise RowError(f"the field {name} must be a list of messages {shape}, not {type(messages).__name__}")
    chat = [_read_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]
    _check_calls(chat, name, tools)
    reply = chat.pop()["content"] if chat[-1]["role"] == "assistant" else ""
    if not chat or chat[-1]["role"] != "user":
        roles = ", ".join(message["role"] for message in messages)
        raise RowError(f"the field {name} must end with the user's message, or with the assistant's after it; its roles are {roles}")
    return tuple(chat[:-1]), chat[-1]["content"], reply


def read_tools(tools: Any, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return a row's tools; none for null. Raise RowError where one is no function with a name of its own and a JSON schema."""
    if isinstance(tools, str):
        tools = _parse(tools, name)
    else:
        tools = _without_nulls(tools)
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RowError(f"the field {name} must be a list of tools, or its JSON text, not {type(tools).__name__}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place, function = f"{name}[{index}]", tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            fix = 'write {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            raise RowError(f"the field {place} must have type function, and function", fix)
        if not read_text(function.get("name"), f"{place}.function.name").strip() or function["name"] in names:
            raise RowError(f"the field {place}.function.name must be a name of its own, not {function['name']!r:.40}")
        names.add(function["name"])
        if problem := _find_fault(json.dumps(function.get("parameters", {}))):
            raise RowError(f"the field {place}.function.parameters must be the JSON schema of an object ({problem})")
    return tuple(tools)


def check_own_chat(history: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RowError for what a format of the user's own gives as tools, or as calls of them, that no chat template takes."""
    read_tools([*tools], "tools")
    if any("tool_calls" in message for message in history):
        chat = [_read_message(message, f"history[{index}]") for index, message in enumerate(history)]
        _check_calls(chat, "history", tools)


def _read_message(message: Any, place: str) -> dict[str, Any]:
    message = _without_nulls(message)
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if isinstance(message, Mapping) and calls:
        message = {"content": "", **message}  # an assistant that calls may say nothing
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        found = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        fix = "use a function of your own as data.format, see docs/guides/data.md"
        raise RowError(f"the field {place} must have role and content, found {found}", fix)
    if message["role"] not in _ROLES:
        raise RowError(f"the field {place}.role must be one of {', '.join(_ROLES)}, not {message['role']!r:.40}")
    result = {"role": message["role"], "content": read_text(message["content"], f"{place}.content")}
    result |= {field: read_text(message[field], f"{place}.{field}") for field in _TEXTS if field in message}
    if calls:
        if message["role"] != "assistant" or not isinstance(calls, list):
            raise RowError(f"the field {place}.tool_calls must be a list, in a message of the assistant")
        result["tool_calls"] = [_read_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return result


def _read_call(call: Any, place: str) -> dict[str, Any]:
    """Return {type, function: {name, arguments: object}} and the call's id, if it has one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise RowError(f"the field {place} must have a function with a name", 'write {"function": {"name": ..., "arguments": {...}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse(arguments, f"{place}.function.arguments")
    if not isinstance(arguments, Mapping):
        raise RowError(f"the field {place}.function.arguments must be a JSON object, not {type(arguments).__name__}")
    own_id = {"id": read_text(call["id"], f"{place}.id")} if "id" in call else {}
    return {
        **own_id,
        "type": "function",
        "function": {"name": read_text(function["name"], f"{place}.function.name"), "arguments": arguments},
    }


def _check_calls(chat: Sequence[ChatMessage], name: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise RowError for a call of a tool that the row has not, and for the answer to a call that was not made."""
    known, ids = {tool["function"]["name"] for tool in tools or ()}, set()
    for index, message in enumerate(chat):
        for call in message.get("tool_calls", ()):
            ids.add(call.get("id"))
            if tools is not None and call["function"]["name"] not in known:
                rule = f"the field {name}[{index}] calls {call['function']['name']!r:.40}, which is none of the row's tools"
                raise RowError(f"{rule} ({', '.join(sorted(known)) or 'it has none'})", "add its schema, or remove this row")
        if "tool_call_id" in message and message["tool_call_id"] not in ids:
            raise RowError(f"the field {name}[{index}].tool_call_id must be that of a call before it, not {message['tool_call_id']!r:.40}")


def _parse(text: str, name: str) -> Any:
    try:
        return json.loads(read_text(text, name))
    except ValueError as error:
        if isinstance(error, RowError):
            raise
        raise RowError(f"the field {name} is not JSON ({error})") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=4096)  # rows share their tools
def _find_fault(parameters: str) -> str:
    """Return what is wrong with a JSON schema of a function's parameters; empty where nothing is."""
    from jsonschema import Draft202012Validator, SchemaError

    schema = json.loads(parameters)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return "its type is another"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message}".splitlines()[0][:160]
    return ""
