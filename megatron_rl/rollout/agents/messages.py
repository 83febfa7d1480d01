"""Messages and requests of agents in one form for all interfaces, and their comparison by meaning. No torch, no HTTP."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from pydantic import AliasPath, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as model
from pydantic_core import from_json
from referencing import Registry

MODEL = "policy"  # model name that the endpoint reports; requests may use any name
TEXT = "text"  # role of a text that is completed without a chat template
_Validator = extend(Draft202012Validator, dict.fromkeys(("pattern", "patternProperties", "format"), lambda *_: None))
_EXACT_INTEGERS = 2**53
"""Floats hold all integers up to this size, so JavaScript writes 2.0 as 2."""


class RefusedError(Exception):
    """A refused request. `code` is OpenAI's error code if there is one."""

    def __init__(self, message: str, status: int = 400, code: str = "unsupported_value") -> None:
        self.status, self.code = status, code
        super().__init__(message)

    def copy(self) -> RefusedError:
        """Return the error without its traceback, which keeps what the frames hold in memory."""
        return RefusedError(str(self), self.status, self.code)


def join_texts(content: Any) -> Any:
    """Return the text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ValueError("only text is supported")
    return "".join(texts)


Name = Annotated[str, Field(max_length=1024)]
Text = Annotated[str, BeforeValidator(join_texts)]
_Label = Annotated[Name, BeforeValidator(lambda value: "" if value is None else value)]


@model(frozen=True, config=ConfigDict(validate_by_name=True))
class ToolCall:
    """A call of a tool, which a request writes as chat completions do."""

    id: Name
    name: Name = Field(validation_alias=AliasPath("function", "name"))
    arguments: str = Field(validation_alias=AliasPath("function", "arguments"))  # JSON as the policy wrote it

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def to_template(self) -> dict[str, Any]:
        """Return the form that chat templates expect, with the arguments as an object if they are valid JSON."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": parse_arguments(self.arguments)}}

    @property
    def meaning(self) -> tuple[str, str]:
        """The name and the parsed arguments, which are equal for all ways to write the same JSON. The id is the endpoint's, not the
        policy's."""
        return self.name, json.dumps(_normalize(parse_arguments(self.arguments.strip() or "{}")), sort_keys=True)


_Calls = Annotated[
    tuple[ToolCall, ...], Field(max_length=1024, fail_fast=True), BeforeValidator(lambda value: () if value is None else value)
]


@model(frozen=True, config=ConfigDict(validate_by_name=True))
class ConversationMessage:
    """A message, which a request writes as chat completions do. Other fields of it are ignored."""

    role: str
    content: Text = ""
    tool_calls: _Calls = ()
    tool_call_id: _Label = ""
    name: _Label = ""
    thought: Text = Field(default="", validation_alias="reasoning_content")  # has no meaning in a history, which keeps tokens

    def to_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        others = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.thought}
        return message | {name: value for name, value in others.items() if value}

    @property
    def size(self) -> int:
        """Number of characters that a chat template may write."""
        calls = sum(len(call.id) + len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.name) + len(self.tool_call_id) + len(self.thought) + calls

    def differs_from(self, other: ConversationMessage) -> str:
        """Return in what the meaning of two messages differs, or "". Blanks around the text, names of speakers, ids, and
        thoughts have none."""
        if self == other:
            return ""
        if self.role != other.role:
            return f"the role is {self.role} instead of {other.role}"
        mine, its = self.content.strip(), other.content.strip()
        if mine != its:
            at = next((at for at, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), min(len(mine), len(its)))
            start = max(at - 10, 0)
            return f"the text is {mine[start : at + 20]!r} instead of {its[start : at + 20]!r} at character {at}"
        calls, known = ([call.meaning for call in each.tool_calls] for each in (self, other))
        return "" if calls == known else f"the tool calls are {str(calls)[:80]} instead of {str(known)[:80]}"


@dataclass(frozen=True)
class PolicyRequest:
    """A request for the policy's next message, of any interface."""

    messages: tuple[ConversationMessage, ...]
    tools: str = "[]"  # JSON as in chat completions; tools are equal if their texts are
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_tools: bool = False  # whether the response is searched for tool calls
    parallel_calls: bool = True  # whether the response may call several tools
    strict: tuple[str, ...] = ()  # names of the tools whose calls must have arguments of their schema
    overridden: tuple[str, ...] = ()  # options of the request that the run overrides
    model: str = MODEL  # echoed in the response
    stream: bool = False
    include_usage: bool = False  # whether the last chunk of a stream holds the usage
    instructions: str | None = None  # echoed

    @property
    def size(self) -> int:
        """Number of characters that a chat template may write."""
        return len(self.tools) + sum(message.size for message in self.messages)


def fits_schema(tools: str, name: str, arguments: str) -> bool:
    """Return whether the arguments of a call are an object of the tool's schema, apart from patterns, which could take forever."""
    schema = next((tool["function"].get("parameters") for tool in json.loads(tools) if tool["function"]["name"] == name), None)
    value = parse_arguments(arguments or "{}")
    try:
        return isinstance(value, dict) and _Validator(schema or {}, registry=Registry()).is_valid(value)
    except Exception:  # the schema is the agent's
        return False


def parse_arguments(arguments: str) -> Any:
    """Return the JSON value of arguments, or the text itself if it is not valid JSON: a policy may write any nesting and any escape."""
    try:
        return from_json(arguments)
    except (ValueError, TypeError):
        return arguments


def _normalize(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _normalize(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_INTEGERS else value
