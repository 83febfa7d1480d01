"""The forms of the endpoint's interfaces: pydantic models that read requests into `PolicyRequest` and write the turns that answer them.
Each interface is a subclass in `chat_forms`, `responses_form`, or `messages_form`.

Whatever an agent sends is read or refused with RefusedError. `from_json` accepts neither nesting of more than 200 levels, nor lone
surrogates, NaN, or integers of more than 4300 digits. How large a body may be is up to the endpoint.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import from_json

from megatron_rl.rollout.agents.messages import MODEL, ConversationMessage, Name, PolicyRequest, RefusedError

if TYPE_CHECKING:
    from megatron_rl.rollout.agents.episode import Turn

Object = dict[str, Any]
FindTurn = Callable[[str], "Turn"]
_OFF = (None, False, 0, "", "none", "auto", "default", "text")
_DEFAULTS = {
    **{"n": 1, "best_of": 1, "repetition_penalty": 1, "length_penalty": 1, "skip_special_tokens": True, "verbosity": "medium"},
    **{"logprobs": False, "logit_bias": {}},
}
"""The values of options that ask for nothing, where this is not any value of `_OFF`."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_LABELS = ("type", "cache_control", "eager_input_streaming")
_TEMPLATE = ("chat_template", "enable_", "thinking", "reasoning", "add_special_tokens")
"""Beginnings of the names of options whose defaults depend on the model."""

_reading = threading.Lock()
"""Held while a body is read, so that at most one parsed body, which may be 20 times as large as its text, is in memory."""


def _read_role(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if (role := value.get("role")) not in _ROLES:
        raise ValueError(f"role must be one of {', '.join(_ROLES)}")
    return {**value, "role": "system"} if role == "developer" else value


Item = TypeVar("Item")
Few = Annotated[tuple[Item, ...], Field(strict=False, max_length=1024, fail_fast=True)]
Messages = Annotated[
    tuple[Annotated[ConversationMessage, BeforeValidator(_read_role)], ...], Field(strict=False, max_length=10_000, fail_fast=True)
]
Count = Annotated[int, Field(ge=1)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    tuple[_Stop, ...], Field(strict=False, max_length=16), BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class Function(Model):
    """A function that the policy may call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[Name, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = Field(None, validation_alias=AliasChoices("parameters", "input_schema"))
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Function:
        _check_neutral({name: value for name, value in (self.model_extra or {}).items() if name not in _TOOL_LABELS})
        json.loads(json.dumps(self.parameters), parse_int=_check_number, parse_constant=_check_number)
        return self

    def describe(self) -> Object:
        values = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in values.items() if value is not None}}


class Form(Model):
    """An interface. Its fields are the options that it honors; their aliases are the names in its requests. Options that it does not list
    are refused, unless their value asks for nothing."""

    path: ClassVar[str]
    decided: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "top_k", "min_p", "seed")
    """Options whose values the run decides, because the policy is trained on what it samples from."""
    labels: ClassVar[tuple[str, ...]] = ()
    """Options about the handling of a request, which do not change its response, whatever their values."""

    model: Name = MODEL
    messages: Messages
    max_tokens: Count | None = None
    stop: Stops = ()
    stream: bool = False

    @classmethod
    def list_honored(cls) -> set[str]:
        """Return the names of the options that are honored."""
        aliases = {name: field.validation_alias or name for name, field in cls.model_fields.items()}
        return {str(name) for each in aliases.values() for name in (each.choices if isinstance(each, AliasChoices) else (each,))}

    def begin(self, find_turn: FindTurn) -> Sequence[ConversationMessage]:
        """Return the messages before those of the request."""
        return ()

    def convert(self, find_turn: FindTurn) -> PolicyRequest:
        """Return what is asked, or raise RefusedError."""
        messages = (*self.begin(find_turn), *self.messages)
        if not messages or messages[-1].role == "assistant":
            raise RefusedError("messages: must not end with a message of the policy", code="invalid_value")
        functions: Sequence[Function] = getattr(self, "tools", ())  # and other options that only some interfaces have
        return PolicyRequest(
            messages,
            json.dumps([function.describe() for function in functions]),
            self.max_tokens,
            self.stop,
            bool(functions),
            getattr(self, "parallel_tool_calls", True),
            tuple(function.name for function in functions if function.strict),
            model=self.model,
            stream=self.stream,
            include_usage=getattr(self, "include_usage", False),
            instructions=getattr(self, "instructions", None),
        )

    @classmethod
    def describe(cls, turn: Turn, request: PolicyRequest) -> Object:
        """Return a response."""
        raise NotImplementedError

    @classmethod
    def list_events(cls, turn: Turn, request: PolicyRequest) -> list[Object]:
        """Return a response as the events of a stream."""
        raise NotImplementedError

    @classmethod
    def describe_error(cls, error: RefusedError) -> Object:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    @classmethod
    def write(cls, turn: Turn, request: PolicyRequest) -> bytes:
        return encode(cls.list_events(turn, request)) if request.stream else json.dumps(cls.describe(turn, request)).encode()


def encode(events: Sequence[Object]) -> bytes:
    """Return the text of a stream's events. Their type names them; if they have none, `[DONE]` is the last."""
    lines = [f"event: {event['type']}\ndata: {json.dumps(event)}" if "type" in event else f"data: {json.dumps(event)}" for event in events]
    return "".join(f"{line}\n\n" for line in (*lines, *([] if "type" in events[-1] else ["data: [DONE]"]))).encode()


def read_request(form: type[Form], body: bytes, find_turn: FindTurn) -> PolicyRequest:
    """Read a body. Raise RefusedError if it is malformed, or for options that would change responses. `find_turn` returns the turn of a
    response's id."""
    with _reading:
        try:
            values = from_json(body, allow_inf_nan=False, cache_strings="none")
        except ValueError as error:
            raise RefusedError(f"the body is not JSON in UTF-8 ({error})", code="invalid_value") from None
        if not isinstance(values, dict):
            raise RefusedError("the body must be a JSON object", code="invalid_value")
        values = {name: value for name, value in values.items() if value is not None}
        known = form.list_honored().union(form.decided, form.labels)
        _check_neutral({name: value for name, value in values.items() if name not in known})
        try:
            asked, choice = form.model_validate(values).convert(find_turn), values.get("tool_choice")
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            rule = first["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
            rule = "must be an object" if first["type"] in ("model_type", "dataclass_type") else rule
            raise RefusedError(f"{'.'.join(map(str, first['loc']))}: {rule}", code="invalid_value") from None
        calls_tools = asked.calls_tools and (choice.get("type") if isinstance(choice, dict) else choice) != "none"
        return replace(asked, calls_tools=calls_tools, overridden=tuple(name for name in form.decided if name in values))


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


def _check_number(text: str) -> None:
    """Raise ValueError for an integer in a schema that does not fit 64 bits, or for infinity: engines cannot read them."""
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise ValueError("numbers must be finite, and integers must have at most 18 digits")
