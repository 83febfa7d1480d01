"""Requests of agents in one form for both of OpenAI's interfaces, and the checks that refuse a request. No torch, no HTTP."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ROLES = ("system", "user", "assistant", "tool")
_OWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Options whose values the run decides, because the policy is trained on what it samples from."""
_WITHOUT_EFFECT = {
    *("model", "messages", "input", "instructions", "tools", "stop", "stream", "stream_options", "previous_response_id", "include"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "store", "metadata", "user", "parallel_tool_calls", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "truncation"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "background": (False,),
}
"""Options that would change what is sampled or returned, with the values that have no such effect."""


class RefusedError(Exception):
    """A refused request. `code` is OpenAI's error code if there is one."""

    def __init__(self, message: str, status: int = 400, code: str = "unsupported_value") -> None:
        self.status, self.code = status, code
        super().__init__(message)


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON as the policy wrote it

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def to_template(self) -> dict[str, Any]:
        """Return the form that chat templates expect, with the arguments as an object if they are valid JSON."""
        call = self.to_openai()
        with contextlib.suppress(ValueError):
            call["function"]["arguments"] = json.loads(self.arguments)
        return call


@dataclass(frozen=True)
class ConversationMessage:
    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def to_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        return message | {name: value for name in ("tool_call_id", "name") if (value := getattr(self, name))}


@dataclass(frozen=True)
class PolicyRequest:
    """A request for the policy's next message."""

    messages: tuple[ConversationMessage, ...]
    tools: str = "[]"  # JSON as in chat completions; tools are equal if their texts are
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_tools: bool = False  # whether the response is searched for tool calls
    overridden: tuple[str, ...] = ()  # options of the request that the run overrides


def read_chat_request(body: Any) -> PolicyRequest:
    """Parse a request to /v1/chat/completions. Raise RefusedError if it is not supported."""
    _check_options(body)
    tools = [_read_tool(tool, tool.get("function") if isinstance(tool, Mapping) else None) for tool in body.get("tools") or ()]
    limit = body.get("max_completion_tokens") if body.get("max_tokens") is None else body["max_tokens"]
    return _make_request(body, [_read_message(message) for message in _as_list(body, "messages")], tools, limit)


def read_response_request(body: Any, earlier: Sequence[ConversationMessage] = ()) -> PolicyRequest:
    """Parse a request to /v1/responses, or raise RefusedError. `earlier`: the conversation that `previous_response_id` names."""
    _check_options(body)
    if body.get("stream"):
        raise RefusedError("stream: responses cannot be streamed here; use chat completions")
    tools = [_read_tool(tool, tool) for tool in body.get("tools") or ()]
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _as_list(body, "input")
    messages = [ConversationMessage("system", body["instructions"])] if body.get("instructions") else []
    messages += [message for message in earlier if not (messages and message.role == "system")]
    for item in items:
        _append_item(messages, item)
    return _make_request(body, messages, tools, body.get("max_output_tokens"))


def _make_request(body: Mapping[str, Any], messages: list[ConversationMessage], tools: list[dict[str, Any]], limit: Any) -> PolicyRequest:
    if not messages or messages[-1].role == "assistant":
        raise RefusedError("messages: must not end with a message of the policy", code="invalid_value")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise RefusedError(f"max_tokens: must be 1 or more, not {limit!r}", code="invalid_value")
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise RefusedError("stop: must be a string or a list of strings", code="invalid_value")
    overridden = tuple(name for name in _OWN_SAMPLING if body.get(name) is not None)
    calls_tools = bool(tools) and body.get("tool_choice") != "none"
    return PolicyRequest(tuple(messages), json.dumps(tools), limit, stop, calls_tools, overridden)


def _check_options(body: Any) -> None:
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object", code="invalid_value")
    for name, value in body.items():
        if value is None or name in _WITHOUT_EFFECT or name in _OWN_SAMPLING or value in _NEUTRAL.get(name, ()):
            continue
        raise RefusedError(f"{name}: {json.dumps(value)[:100]} is not supported here; leave it out")


def _as_list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise RefusedError(f"{name}: must be a list", code="invalid_value")
    return value


def _read_tool(tool: Any, function: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping) or "name" not in function:
        raise RefusedError("tools: only functions with a name are supported")
    known = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": known}


def _read_message(message: Any) -> ConversationMessage:
    if not isinstance(message, Mapping):
        raise RefusedError("messages: each must be an object", code="invalid_value")
    role = {"developer": "system"}.get(message.get("role", ""), message.get("role"))
    if role not in _ROLES:
        raise RefusedError(f"messages: {message.get('role')!r} is not a known role", code="invalid_value")
    calls = tuple(_read_call(call.get("id"), call.get("function") or {}) for call in message.get("tool_calls") or ())
    content = _read_content(message.get("content"))
    return ConversationMessage(role, content, calls, message.get("tool_call_id") or "", message.get("name") or "")


def _read_call(call_id: Any, function: Mapping[str, Any]) -> ToolCall:
    values = (call_id, function.get("name"), function.get("arguments"))
    if not all(isinstance(value, str) for value in values):
        raise RefusedError("tool_calls: each must have an id, a name and arguments, all strings", code="invalid_value")
    return ToolCall(*map(str, values))


def _read_content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: Iterable[Any] = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RefusedError("content: only text is supported")
    return "".join(map(str, texts))


def _append_item(messages: list[ConversationMessage], item: Any) -> None:
    """Add one item of a response's input. Text and calls of one response are merged into one message."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "function_call_output":
        messages.append(ConversationMessage("tool", _read_content(item.get("output")), tool_call_id=item.get("call_id") or ""))
        return
    if kind == "message":
        message = _read_message(item)
    elif kind == "function_call":
        message = ConversationMessage("assistant", tool_calls=(_read_call(item.get("call_id"), item),))
    else:
        raise RefusedError(f"input: items of type {kind!r} are not supported")
    last = messages[-1] if messages else None
    if last is not None and last.role == message.role == "assistant" and message.tool_calls:
        message = ConversationMessage("assistant", last.content, last.tool_calls + message.tool_calls)
        messages.pop()
    messages.append(message)
