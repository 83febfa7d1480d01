"""The bodies of agents' requests: pydantic models with a type and a limit for each field, read into `PolicyRequest`. What all interfaces
share, and those of OpenAI's completions; the others are `responses_form` and `messages_form`.

Whatever an agent sends is read or refused with RefusedError. `from_json` accepts neither nesting of more than 200 levels, nor lone
surrogates, NaN, or integers of more than 4300 digits. How large a body may be is up to the endpoint.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import from_json

from megatron_rl.rollout.agents.episode import AgentEpisode
from megatron_rl.rollout.agents.messages import MODEL, TEXT, ConversationMessage, PolicyRequest, RefusedError, ToolCall

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


class Request(Model):
    """The body of a request. Each interface has a model of its own."""

    decided: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "top_k", "min_p", "seed")
    """Options whose values the run decides, because the policy is trained on what it samples from."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Options about the handling of a request, which do not change its response, whatever their values. All others that are no fields are
    refused, unless their value asks for nothing."""
    model: Name | None = None
    stream: bool | None = None

    def convert(self, episode: AgentEpisode) -> PolicyRequest:
        """Return what is asked, or raise RefusedError."""
        raise NotImplementedError

    def make(
        self, messages: Sequence[ConversationMessage], functions: Sequence[Function], limit: int | None, **others: Any
    ) -> PolicyRequest:
        """Return the request of a conversation. `limit`: of sampled tokens. `others`: further fields of `PolicyRequest`."""
        if not messages or messages[-1].role == "assistant":
            raise RefusedError("messages: must not end with a message of the policy", code="invalid_value")
        for function in functions:
            _check_neutral({name: value for name, value in (function.model_extra or {}).items() if name not in _TOOL_LABELS})
        tools = [{"type": "function", "function": function.describe()} for function in functions]
        text = json.dumps(tools)
        json.loads(text, parse_int=_check_number, parse_constant=_check_number)
        strict = tuple(function.name for function in functions if function.strict)
        others |= {"strict": strict, "model": self.model or MODEL, "stream": bool(self.stream)}
        return PolicyRequest(tuple(messages), text, limit, calls_tools=bool(tools), **others)


class _StreamOptions(Model):
    include_usage: bool | None = None


class OpenAIRequest(Request):
    """What OpenAI's interfaces share."""

    labels: ClassVar[tuple[str, ...]] = (
        *("store", "metadata", "user", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    )
    stop: Annotated[list[Stop] | None, Field(max_length=16), BeforeValidator(_as_list)] = None
    stream_options: _StreamOptions | None = None
    parallel_tool_calls: bool | None = None

    def make(
        self, messages: Sequence[ConversationMessage], functions: Sequence[Function], limit: int | None, **others: Any
    ) -> PolicyRequest:
        others["include_usage"] = bool(self.stream_options and self.stream_options.include_usage)
        others["parallel_calls"] = self.parallel_tool_calls is not False
        return super().make(messages, functions, limit, stop=tuple(self.stop or ()), **others)


class TextRequest(OpenAIRequest):
    """A request to /v1/completions, with OpenAI's default of 16 tokens."""

    prompt: Annotated[str, BeforeValidator(_as_text)]
    max_tokens: Count | None = None

    def convert(self, episode: AgentEpisode) -> PolicyRequest:
        return self.make([ConversationMessage(TEXT, self.prompt)], (), self.max_tokens or 16)


class ChatRequest(OpenAIRequest):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(max_length=10_000, fail_fast=True)]
    tools: Few[_Tool] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None

    def convert(self, episode: AgentEpisode) -> PolicyRequest:
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.make([message.convert() for message in self.messages], [tool.function for tool in self.tools or ()], limit)


def read_request(model: type[Request], episode: AgentEpisode, body: bytes) -> PolicyRequest:
    """Read a body. Raise RefusedError if it is malformed, or for options that would change responses."""
    with _reading:
        try:
            values = from_json(body, allow_inf_nan=False, cache_strings="none")
        except ValueError as error:
            raise RefusedError(f"the body is not JSON in UTF-8 ({error})", code="invalid_value") from None
        if not isinstance(values, dict):
            raise RefusedError("the body must be a JSON object", code="invalid_value")
        known = (*model.model_fields, *model.decided, *model.labels)
        _check_neutral({name: value for name, value in values.items() if name not in known})
        asked, choice = validate(model, values).convert(episode), values.get("tool_choice")
        calls_tools = asked.calls_tools and (choice.get("type") if isinstance(choice, dict) else choice) != "none"
        overridden = tuple(name for name in model.decided if values.get(name) is not None)
        return replace(asked, calls_tools=calls_tools, overridden=overridden)


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


def _check_number(text: str) -> None:
    """Raise RefusedError for an integer in a schema that does not fit 64 bits, or for infinity: engines cannot read them."""
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise RefusedError("tools: numbers must be finite, and integers must have at most 18 digits", code="invalid_value")
