"""The bodies of agents' requests: pydantic models with a type and a limit for each field, read into `PolicyRequest`.

Whatever an agent sends is read or refused with RefusedError. `from_json` accepts neither nesting of more than 200 levels, nor lone
surrogates, NaN, or integers of more than 4300 digits. How large a body may be is up to the endpoint.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from megatron_rl.rollout.agents.messages import MODEL, TEXT, ConversationMessage, PolicyRequest, RefusedError, ToolCall

_OWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Options whose values the run decides, because the policy is trained on what it samples from."""
_LABELS = {
    *("include", "store", "metadata", "user", "parallel_tool_calls", "service_tier", "truncation"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
}
"""Options about the handling of a request, which do not change its response, whatever their values."""
_OFF = (None, False, 0, "", "none", "auto", "default", "text")
_DEFAULTS = {
    **{"n": 1, "best_of": 1, "repetition_penalty": 1, "length_penalty": 1, "skip_special_tokens": True, "verbosity": "medium"},
    **{"logprobs": False, "logit_bias": {}},
}
"""The values of options that ask for nothing, where this is not any value of `_OFF`."""
_TEMPLATE = ("chat_template", "enable_", "thinking", "reasoning", "add_special_tokens")
"""Beginnings of the names of options whose defaults depend on the model."""

_reading = threading.Lock()
"""Held while a body is read, so that at most one parsed body, which may be 20 times as large as its text, is in memory."""


def _join_texts(content: Any) -> Any:
    """Return the text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ValueError("only text is supported")
    return "".join(texts)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_text(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


Item = TypeVar("Item")
_Few = Annotated[list[Item], Field(max_length=1024, fail_fast=True)]
_Name = Annotated[str, Field(max_length=1024)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Count = Annotated[int, Field(ge=1)]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Function(_Model):
    """A function that the policy may call."""

    name: Annotated[_Name, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None

    def describe(self) -> dict[str, Any]:
        return {name: value for name in ("name", "description", "parameters") if (value := getattr(self, name)) is not None}


class _Tool(_Model):
    type: Literal["function"]
    function: _Function


class _FlatTool(_Function):
    """A tool as the responses interface writes it."""

    type: Literal["function"]


class _CalledFunction(_Model):
    name: _Name
    arguments: str


class _Call(_Model):
    id: _Name
    function: _CalledFunction


class _Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_join_texts)] = ""
    tool_calls: _Few[_Call] | None = None
    tool_call_id: _Name | None = None
    name: _Name | None = None

    def convert(self) -> ConversationMessage:
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        role = "system" if self.role == "developer" else self.role
        return ConversationMessage(role, self.content, calls, self.tool_call_id or "", self.name or "")


class _CallItem(_CalledFunction):
    call_id: _Name


class _OutputItem(_Model):
    output: Annotated[str, BeforeValidator(_join_texts)] = ""
    call_id: _Name | None = None


class _StreamOptions(_Model):
    include_usage: bool | None = None


class _Request(_Model):
    model: _Name | None = None
    stop: Annotated[list[_Stop] | None, Field(max_length=16), BeforeValidator(_as_list)] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _TextRequest(_Request):
    prompt: Annotated[str, BeforeValidator(_as_text)]
    max_tokens: _Count | None = None


class _ChatRequest(_Request):
    messages: Annotated[list[_Message], Field(max_length=10_000, fail_fast=True)]
    tools: _Few[_Tool] | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None


class _ResponseRequest(_Request):
    input: Annotated[list[dict[str, Any]], Field(max_length=10_000, fail_fast=True), BeforeValidator(_as_items)]
    tools: _Few[_FlatTool] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    max_output_tokens: _Count | None = None


def read_chat_request(body: bytes | bytearray) -> PolicyRequest:
    """Read a request to /v1/chat/completions. Raise RefusedError if it is malformed or not supported."""
    with _reading:
        values, request = _read_body(body, _ChatRequest)
        messages = [message.convert() for message in request.messages]
        tools = [tool.function for tool in request.tools or ()]
        limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
        return _make_request(values, request, messages, tools, limit)


def read_text_request(body: bytes | bytearray) -> PolicyRequest:
    """Read a request to /v1/completions, with OpenAI's default of 16 tokens, or raise RefusedError."""
    with _reading:
        values, request = _read_body(body, _TextRequest)
        return _make_request(values, request, [ConversationMessage(TEXT, request.prompt)], (), request.max_tokens or 16)


def read_response_request(body: bytes | bytearray, find_earlier: Callable[[str], Sequence[ConversationMessage]]) -> PolicyRequest:
    """Read a request to /v1/responses, or raise RefusedError. `find_earlier`: returns the conversation that
    `previous_response_id` names."""
    with _reading:
        values, request = _read_body(body, _ResponseRequest)
        if request.stream:
            raise RefusedError("stream: responses cannot be streamed here; use chat completions")
        messages = [ConversationMessage("system", request.instructions)] if request.instructions else []
        earlier = find_earlier(request.previous_response_id) if request.previous_response_id else ()
        messages += [message for message in earlier if not (messages and message.role == "system")]
        for item in request.input:
            _append_item(messages, item)
        return _make_request(values, request, messages, request.tools or (), request.max_output_tokens)


R = TypeVar("R", bound=_Request)


def _read_body(body: bytes | bytearray, model: type[R]) -> tuple[dict[str, Any], R]:
    """Return the fields of a body, and the request. Raise RefusedError for options that would change responses."""
    try:
        values = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise RefusedError(f"the body is not JSON in UTF-8 ({error})", code="invalid_value") from None
    if not isinstance(values, dict):
        raise RefusedError("the body must be a JSON object", code="invalid_value")
    for name, value in values.items():
        if name not in model.model_fields and name not in _LABELS and name not in _OWN_SAMPLING and not _is_neutral(name, value):
            raise RefusedError(f"{name[:100]}: {json.dumps(value)[:100]} is not supported here; leave it out")
    return values, _validate(model, values)


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether an option asks for nothing with this value: it is off, empty, or its default, like everything in it."""
    if name in _DEFAULTS:
        return value is None or (value == _DEFAULTS[name] and isinstance(value, bool) == isinstance(_DEFAULTS[name], bool))
    if name.startswith(_TEMPLATE):
        return value in (None, {}, [])
    if isinstance(value, dict):
        return bool(value) and all(_is_neutral(key, item) for key, item in value.items())
    return all(_is_neutral("", item) for item in value) if isinstance(value, list) else value in _OFF


M = TypeVar("M", bound=BaseModel)


def _validate(model: type[M], values: Any, place: str = "") -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in (place, *first["loc"]) if part != "")
        rule = "must be an object" if first["type"] == "model_type" else first["msg"].removeprefix("Value error, ")
        raise RefusedError(f"{where}: {rule}", code="invalid_value") from None


def _make_request(
    values: dict[str, Any], request: _Request, messages: Sequence[ConversationMessage], functions: Sequence[_Function], limit: int | None
) -> PolicyRequest:
    if not messages or messages[-1].role == "assistant":
        raise RefusedError("messages: must not end with a message of the policy", code="invalid_value")
    tools = [{"type": "function", "function": function.describe()} for function in functions]
    text = json.dumps(tools)
    json.loads(text, parse_int=_check_number, parse_constant=_check_number)
    overridden = tuple(name for name in _OWN_SAMPLING if values.get(name) is not None)
    calls_tools = bool(tools) and values.get("tool_choice") != "none"
    stop, model = tuple(request.stop or ()), request.model or MODEL
    stream, options = bool(request.stream), request.stream_options
    include_usage, instructions = bool(options and options.include_usage), getattr(request, "instructions", None)
    return PolicyRequest(tuple(messages), text, limit, stop, calls_tools, overridden, model, stream, include_usage, instructions)


def _check_number(text: str) -> None:
    """Raise RefusedError for an integer in a schema that does not fit 64 bits, or for infinity: engines cannot read them."""
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise RefusedError("tools: numbers must be finite, and integers must have at most 18 digits", code="invalid_value")


def _append_item(messages: list[ConversationMessage], item: dict[str, Any]) -> None:
    """Add one item of a response's input. Text and calls of one response are merged into one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        reply = _validate(_OutputItem, item, "input")
        messages.append(ConversationMessage("tool", reply.output, tool_call_id=reply.call_id or ""))
        return
    if kind == "message":
        message = _validate(_Message, item, "input").convert()
    elif kind == "function_call":
        call = _validate(_CallItem, item, "input")
        message = ConversationMessage("assistant", tool_calls=(ToolCall(call.call_id, call.name, call.arguments),))
    else:
        raise RefusedError(f"input: items of type {json.dumps(kind)[:100]} are not supported")
    last = messages[-1] if messages else None
    if last is not None and last.role == message.role == "assistant" and message.tool_calls:
        message = ConversationMessage("assistant", last.content, last.tool_calls + message.tool_calls)
        messages.pop()
    messages.append(message)
