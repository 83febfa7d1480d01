"""The bodies of agents' requests: pydantic models with a type and a limit for each field, read into `PolicyRequest`. What all interfaces
share, and those of OpenAI's completions; the others are `responses_form` and `messages_form`.

Whatever an agent sends is read or refused with RefusedError. `from_json` accepts neither nesting of more than 200 levels, nor lone
surrogates, NaN, or integers of more than 4300 digits. How large a body may be is up to the endpoint.
"""

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError
from pydantic_core import from_json

from megatron_rl.rollout.agents.messages import MODEL, TEXT, ConversationMessage, PolicyRequest, RefusedError, ToolCall


class Options(NamedTuple):
    """Options of an interface that its model does not read. All further ones are refused, unless their value asks for nothing."""

    run: tuple[str, ...]
    """Options whose values the run decides, because the policy is trained on what it samples from."""
    labels: tuple[str, ...]
    """Options about the handling of a request, which do not change its response, whatever their values."""


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
_KEYS = ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
_HANDLING = ("store", "metadata", "user", "service_tier", "safety_identifier", *_KEYS)
COMPLETIONS, RESPONSES = Options(_SAMPLING, _HANDLING), Options((*_SAMPLING, "reasoning"), (*_HANDLING, "client_metadata"))
_OFF = (None, False, 0, "", "none", "auto", "default", "text")
_DEFAULTS = {
    **{"n": 1, "best_of": 1, "repetition_penalty": 1, "length_penalty": 1, "skip_special_tokens": True, "verbosity": "medium"},
    **{"logprobs": False, "logit_bias": {}},
}
"""The values of options that ask for nothing, where this is not any value of `_OFF`."""
_TOOL_LABELS = ("type", "cache_control", "eager_input_streaming")
_TEMPLATE = ("chat_template", "enable_", "thinking", "reasoning", "add_special_tokens")
"""Beginnings of the names of options whose defaults depend on the model."""

_reading = threading.Lock()
"""Held while a body is read, so that at most one parsed body, which may be 20 times as large as its text, is in memory."""


def join_texts(content: Any) -> Any:
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
Few = Annotated[list[Item], Field(max_length=1024, fail_fast=True)]
Name = Annotated[str, Field(max_length=1024)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1)]


class Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Function(Model):
    """A function that the policy may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[Name, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None

    def describe(self) -> dict[str, Any]:
        return {name: value for name in ("name", "description", "parameters") if (value := getattr(self, name)) is not None}


class _Tool(Model):
    type: Literal["function"]
    function: Function


class CalledFunction(Model):
    name: Name
    arguments: str


class _Call(Model):
    id: Name
    function: CalledFunction


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(join_texts)] = ""
    tool_calls: Few[_Call] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning_content: str | None = None

    def convert(self) -> ConversationMessage:
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        role = "system" if self.role == "developer" else self.role
        return ConversationMessage(role, self.content, calls, self.tool_call_id or "", self.name or "", self.reasoning_content or "")


class _StreamOptions(Model):
    include_usage: bool | None = None


class Request(Model):
    model: Name | None = None
    stop: Annotated[list[Stop] | None, Field(max_length=16), BeforeValidator(_as_list)] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    parallel_tool_calls: bool | None = None
    _overridden: tuple[str, ...] = PrivateAttr(())


class _TextRequest(Request):
    prompt: Annotated[str, BeforeValidator(_as_text)]
    max_tokens: Count | None = None


class _ChatRequest(Request):
    messages: Annotated[list[Message], Field(max_length=10_000, fail_fast=True)]
    tools: Few[_Tool] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None


def read_chat_request(body: bytes | bytearray) -> PolicyRequest:
    """Read a request to /v1/chat/completions. Raise RefusedError if it is malformed or not supported."""
    with reading_body(body, _ChatRequest, COMPLETIONS) as (values, request):
        messages = [message.convert() for message in request.messages]
        tools = [tool.function for tool in request.tools or ()]
        limit = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
        return make_request(values, request, messages, tools, limit)


def read_text_request(body: bytes | bytearray) -> PolicyRequest:
    """Read a request to /v1/completions, with OpenAI's default of 16 tokens, or raise RefusedError."""
    with reading_body(body, _TextRequest, COMPLETIONS) as (values, request):
        return make_request(values, request, [ConversationMessage(TEXT, request.prompt)], (), request.max_tokens or 16)


R = TypeVar("R", bound=Request)


@contextmanager
def reading_body(body: bytes | bytearray, model: type[R], options: Options) -> Iterator[tuple[dict[str, Any], R]]:
    """Enclose the reading of a body, and yield its fields and the request. Raise RefusedError for options that would change responses."""
    with _reading:
        try:
            values = from_json(body, allow_inf_nan=False, cache_strings="none")
        except ValueError as error:
            raise RefusedError(f"the body is not JSON in UTF-8 ({error})", code="invalid_value") from None
        if not isinstance(values, dict):
            raise RefusedError("the body must be a JSON object", code="invalid_value")
        _check_neutral({name: value for name, value in values.items() if name not in (*model.model_fields, *options.run, *options.labels)})
        request = validate(model, values)
        request._overridden = tuple(name for name in options.run if values.get(name) is not None)
        yield values, request


def _check_neutral(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not _is_neutral(name, value):
            raise RefusedError(f"{name[:100]}: {json.dumps(value)[:100]} is not supported here; leave it out")


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


def validate(model: type[M], values: Any, place: str = "") -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in (place, *first["loc"]) if part != "")
        rule = "must be an object" if first["type"] == "model_type" else first["msg"].removeprefix("Value error, ")
        raise RefusedError(f"{where}: {rule}", code="invalid_value") from None


def make_request(
    values: Mapping[str, Any], request: Request, messages: Sequence[ConversationMessage], functions: Sequence[Function], limit: int | None
) -> PolicyRequest:
    """Return the request of a conversation. `values`: the fields of its body; `limit`: of sampled tokens."""
    if not messages or messages[-1].role == "assistant":
        raise RefusedError("messages: must not end with a message of the policy", code="invalid_value")
    for function in functions:
        _check_neutral({name: value for name, value in (function.model_extra or {}).items() if name not in _TOOL_LABELS})
    tools = [{"type": "function", "function": function.describe()} for function in functions]
    text = json.dumps(tools)
    json.loads(text, parse_int=_check_number, parse_constant=_check_number)
    options = request.stream_options
    return PolicyRequest(
        tuple(messages),
        text,
        limit,
        tuple(request.stop or ()),
        calls_tools=bool(tools) and values.get("tool_choice") != "none",
        parallel_calls=request.parallel_tool_calls is not False,
        strict=tuple(function.name for function in functions if function.strict),
        overridden=request._overridden,
        model=request.model or MODEL,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        instructions=values.get("instructions"),
    )


def _check_number(text: str) -> None:
    """Raise RefusedError for an integer in a schema that does not fit 64 bits, or for infinity: engines cannot read them."""
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise RefusedError("tools: numbers must be finite, and integers must have at most 18 digits", code="invalid_value")
