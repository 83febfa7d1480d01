"""Checks the messages and tools of a row, and converts them to the form of chat templates.

    messages    [{"role": "user", "content": "1+1?"}, ...]; assistant messages may have tool_calls, tool messages tool_call_id and name
                content may be a list of text parts, such as [{"type": "text", "text": "1+1?"}]
    tools       [{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}, ...]

Tools and the arguments of a call may be JSON texts, which are used unchanged. Otherwise null fields are removed, because Parquet adds null
fields that other rows have.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megatron_rl.data.formats import RowError, parse_json, read_text
from megatron_rl.types import ChatMessage

_log = logging.getLogger(__name__)
_said: set[str] = set()  # columns about which `say_dropped` has warned
_ROLES = ("system", "user", "assistant", "tool")  # and developer, which is read as system
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXTS = ("reasoning_content", "name", "tool_call_id")
"""Text fields of a message, apart from role and content, that chat templates use."""


def split_chat(messages: Any, name: str, tools: Sequence[Mapping[str, Any]] | None = None) -> tuple[tuple[ChatMessage, ...], str, str]:
    """Return the messages before the last user message, its content, and the content of the assistant message after it.

    Args:
        name: column of the messages.
        tools: tools that calls may use, or None to skip this check.

    Raises:
        RowError: The messages are malformed.
    """
    if not isinstance(messages, list) or not messages:
        shape = '[{"role": "user", "content": "..."}]'
        raise RowError(
            f"the field {name} must be a list of messages {shape}, not {'an empty one' if messages == [] else type(messages).__name__}"
        )
    chat = [_read_message(message, f"{name}[{index}]") for index, message in enumerate(messages)]
    _check_calls(chat, name, tools)
    reply = chat.pop()["content"] if chat[-1]["role"] == "assistant" else ""
    if not chat or chat[-1]["role"] != "user":
        roles = ", ".join(message["role"] for message in messages)
        raise RowError(f"the field {name} must end with a user message, or a user and an assistant message; its roles are {roles}")
    return tuple(chat[:-1]), chat[-1]["content"], reply


def say_dropped(reply: str, name: str) -> None:
    """Warn once that the assistant message at the end of the column `name` is neither asked nor the gold answer."""
    if reply and name not in _said:
        _said.add(name)
        _log.warning(
            "the assistant message at the end of %s is left out: the policy begins its response, and the gold answer is elsewhere", name
        )


def read_tools(tools: Any, name: str) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a row, or () for null. Raise RowError unless each is a function with a unique name and a JSON schema."""
    tools = parse_json(read_text(tools, name), f"the field {name} ") if isinstance(tools, str) else _without_nulls(tools)
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise RowError(f"the field {name} must be a list of tools, or its JSON text, not {type(tools).__name__}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        place, function = f"{name}[{index}]", tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            fix = 'write {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            raise RowError(f'the field {place} must have type = "function" and a function', fix)
        if not read_text(function.get("name"), f"{place}.function.name").strip() or function["name"] in names:
            raise RowError(f"the field {place}.function.name must be a unique, nonempty name, not {function['name']!r:.40}")
        names.add(function["name"])
        if problem := _find_schema_problem(json.dumps(function.get("parameters", {}))):
            raise RowError(f"the field {place}.function.parameters must be the JSON schema of an object ({problem})")
    return tuple(tools)


def check_own_chat(history: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RowError if a custom format returns tools or tool calls that chat templates do not accept."""
    read_tools([*tools], "tools")
    if any("tool_calls" in message for message in history):
        chat = [_read_message(message, f"history[{index}]") for index, message in enumerate(history)]
        _check_calls(chat, "history", tools)


def _read_message(message: Any, place: str) -> dict[str, Any]:
    message = _without_nulls(message)
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if calls:
        message = {"content": "", **message}  # an assistant message with calls needs no content
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        found = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise RowError(f"the field {place} must have role and content, found {found}", "use a custom data.format, see docs/guides/data.md")
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in _ROLES:
        raise RowError(f"the field {place}.role must be one of {', '.join(_ROLES)}, not {message['role']!r:.40}")
    result = {"role": role, "content": _read_content(message["content"], f"{place}.content")}
    result |= {field: read_text(message[field], f"{place}.{field}") for field in _TEXTS if field in message}
    if calls:
        if message["role"] != "assistant" or not isinstance(calls, list):
            raise RowError(f"the field {place}.tool_calls must be a list, in an assistant message")
        result["tool_calls"] = [_read_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return result


def _read_content(content: Any, place: str) -> str:
    """Return the text of a message's content, which may be a list of text parts."""
    if not isinstance(content, list):
        return read_text(content, place)
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part, Mapping):
            raise RowError(f"the field {place}[{index}] is of type {kind!r:.40}, and only text is supported", "remove this row")
    return "".join(read_text(part.get("text"), f"{place}[{index}].text") for index, part in enumerate(content))


def _read_call(call: Any, place: str) -> dict[str, Any]:
    """Return {id (if present), type, function: {name, arguments}}, with the arguments as a mapping."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise RowError(f"the field {place} must have a function with a name", 'write {"function": {"name": ..., "arguments": {...}}}')
    arguments, field = function.get("arguments", {}), f"the field {place}.function.arguments"
    if isinstance(arguments, str):
        arguments = parse_json(read_text(arguments, f"{place}.function.arguments"), f"{field} ")
    if not isinstance(arguments, Mapping):
        raise RowError(f"{field} must be a JSON object, not {type(arguments).__name__}")
    own_id = {"id": read_text(call["id"], f"{place}.id")} if "id" in call else {}
    name = read_text(function["name"], f"{place}.function.name")
    return {**own_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_calls(chat: Sequence[ChatMessage], name: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise RowError for a call of a tool that is not in `tools`, or a tool message without an earlier call."""
    known, ids = {tool["function"]["name"] for tool in tools or ()}, set()
    for index, message in enumerate(chat):
        for call in message.get("tool_calls", ()):
            ids.add(call.get("id"))
            if tools is not None and call["function"]["name"] not in known:
                rule = f"the field {name}[{index}] calls {call['function']['name']!r:.40}, which is not one of the row's tools"
                raise RowError(f"{rule} ({', '.join(sorted(known)) or 'none'})", "add its schema, or remove this row")
        if "tool_call_id" in message and message["tool_call_id"] not in ids:
            raise RowError(f"the field {name}[{index}].tool_call_id must be the id of an earlier call, not {message['tool_call_id']!r:.40}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(field) for key, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=4096)  # many rows have the same tools
def _find_schema_problem(parameters: str) -> str:
    """Return what is wrong with the JSON schema of a function's parameters, or "" if it is valid."""
    from jsonschema import Draft202012Validator, SchemaError

    schema = json.loads(parameters)
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        return "it has another type"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        return f"{error.json_path}: {error.message}".splitlines()[0][:160]
    return ""
