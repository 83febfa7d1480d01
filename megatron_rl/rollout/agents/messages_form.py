"""Anthropic's interface: /v1/messages, also streamed, and the count of a request's tokens."""

import json
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from megatron_rl.rollout.agents import requests
from megatron_rl.rollout.agents.episode import AgentEpisode, Turn
from megatron_rl.rollout.agents.messages import ConversationMessage, PolicyRequest, RefusedError, ToolCall, parse_arguments

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class _Exact(requests.Model):
    model_config = ConfigDict(extra="forbid")


class _Effort(_Exact):
    effort: str | None = None


class _Edit(_Exact):
    """An edit that keeps what it could drop, as Claude Code sends it."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class _ContextManagement(_Exact):
    edits: list[_Edit] | None = None


class _ToolChoice(_Exact):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class _Tool(requests.Function):
    type: Literal["custom"] | None = None
    parameters: dict[str, JsonValue] | None = Field(None, alias="input_schema")


class _Message(requests.Model):
    role: Literal["system", "user", "assistant"]
    content: str | requests.Few[dict[str, Any]]


class _ToolUse(requests.Model):
    id: requests.Name
    name: requests.Name
    input: dict[str, JsonValue]


class _ToolResult(requests.Model):
    tool_use_id: requests.Name
    content: Annotated[str, BeforeValidator(requests.join_texts)] = ""


class MessagesRequest(requests.Request):
    """A request to /v1/messages or /v1/messages/count_tokens."""

    decided = ("temperature", "top_p", "top_k", "thinking", "output_config")
    labels = ("metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id", "workspace_id")
    messages: Annotated[list[_Message], Field(max_length=10_000, fail_fast=True)]
    system: Annotated[str, BeforeValidator(requests.join_texts)] = ""
    tools: requests.Few[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _Effort | None = None
    context_management: _ContextManagement | None = None
    max_tokens: requests.Count | None = None
    stop_sequences: Annotated[list[requests.Stop] | None, Field(max_length=16)] = None

    def convert(self, episode: AgentEpisode) -> PolicyRequest:
        messages = [ConversationMessage("system", self.system)] if self.system else []
        for message in self.messages:
            messages += _convert(message)
        parallel = not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)
        return self.make(messages, self.tools or (), self.max_tokens, stop=tuple(self.stop_sequences or ()), parallel_calls=parallel)


def _convert(message: _Message) -> list[ConversationMessage]:
    """Return a message's own text, thought, and calls as one message behind those of the results of tools in it."""
    results, calls, said = list[ConversationMessage](), list[ToolCall](), {"text": "", "thinking": ""}
    for block in [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content:
        kind, place = block.get("type"), "messages.content"
        if kind in ("text", "thinking"):
            if not isinstance(text := block.get(kind), str):
                raise RefusedError(f"{place}.{kind}: must be a text", code="invalid_value")
            said[kind] += text
        elif kind == "tool_result":
            result = requests.validate(_ToolResult, block, place)
            results.append(ConversationMessage("tool", result.content, tool_call_id=result.tool_use_id))
        elif kind == "tool_use":
            call = requests.validate(_ToolUse, block, place)
            calls.append(ToolCall(call.id, call.name, json.dumps(call.input)))
        elif kind != "redacted_thinking":
            raise RefusedError(f"messages: blocks of type {json.dumps(kind)[:100]} are not supported")
    if results and not (calls or any(said.values())):
        return results
    return [*results, ConversationMessage(message.role, said["text"], tuple(calls), thought=said["thinking"])]


def describe(turn: Turn, request: PolicyRequest) -> dict[str, Any]:
    said = turn.messages[-1]
    blocks: list[dict[str, Any]] = [{"type": "thinking", "thinking": said.thought, "signature": ""}] if said.thought else []
    if said.content or not (said.thought or said.tool_calls):
        blocks.append({"type": "text", "text": said.content})
    blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": _read_input(call)} for call in said.tool_calls]
    ended = "max_tokens" if turn.generation.finish_reason == "length" else "stop_sequence" if turn.stop else "end_turn"
    return {
        "id": f"msg_{turn.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": "tool_use" if said.tool_calls else ended,
        "stop_sequence": turn.stop or None,
        "usage": _count(turn.prompt_tokens, len(turn.generation.output_ids_T)),
    }


def _count(before: int, sampled: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": before, "output_tokens": sampled, **cached}


def _read_input(call: ToolCall) -> dict[str, Any]:
    """Return the arguments as an object, which this interface expects."""
    value = parse_arguments(call.arguments or "{}")
    return value if isinstance(value, dict) else {"arguments": value}


def stream(turn: Turn, request: PolicyRequest) -> list[dict[str, Any]]:
    whole = describe(turn, request)
    begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": whole["usage"] | {"output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    empty: dict[str, Any]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "tool_use":
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            name = block["type"]
            empty, delta = {name: ""}, {"type": f"{name}_delta", name: block[name]}
        events += [
            {"type": "content_block_start", "index": index, "content_block": block | empty},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    return [*events, {"type": "message_delta", "delta": end, "usage": whole["usage"]}, {"type": "message_stop"}]


def describe_error(error: RefusedError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
