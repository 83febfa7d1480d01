"""Anthropic's interface: /v1/messages, also streamed, and the count of a request's tokens."""

from __future__ import annotations

import json
from collections import defaultdict
from http import HTTPStatus
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.forms import Few, FindTurn, Form, Function, Messages, Model, Object, Stops
from megatron_rl.rollout.agents.messages import ConversationMessage, PolicyRequest, RefusedError, Text, parse_arguments

_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class _Exact(Model):
    model_config = ConfigDict(extra="forbid")


class _Effort(_Exact):
    effort: str | None = None


class _Edit(_Exact):
    """An edit that keeps what it could drop, as Claude Code sends it."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class _ContextManagement(_Exact):
    edits: Few[_Edit] = ()


class _ToolChoice(_Exact):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class _Tool(Function):
    type: Literal["custom"] | None = None


def _read_messages(messages: Any) -> Any:
    return [each for message in messages for each in _read_message(message)] if isinstance(messages, list) else messages


def _read_message(message: Any) -> list[Any]:
    """Return a message as messages of chat completions: its own text, thought, and calls behind the results of tools in it."""
    if not isinstance(message, dict) or not isinstance(blocks := message.get("content"), list):
        return [message]
    found = defaultdict[Any, list[Object]](list)
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else block
        if kind not in _BLOCKS:
            raise RefusedError(f"messages: blocks of type {json.dumps(kind)[:100]} are not supported")
        found[kind].append(block)
    results = [{"role": "tool", "content": each.get("content"), "tool_call_id": each.get("tool_use_id")} for each in found["tool_result"]]
    calls = [
        {"id": each.get("id"), "function": {"name": each.get("name"), "arguments": json.dumps(each.get("input"))}}
        for each in found["tool_use"]
    ]
    thoughts = [{"text": each.get("thinking")} for each in found["thinking"]]
    said = {"role": message.get("role"), "content": found["text"], "tool_calls": calls, "reasoning_content": thoughts}
    return results if results and not (calls or thoughts or found["text"]) else [*results, said]


class MessagesForm(Form):
    path = "/v1/messages"
    decided = ("temperature", "top_p", "top_k", "thinking", "output_config")
    labels = ("metadata", "service_tier", "cache_control", "inference_geo", "speed", "user_profile_id", "workspace_id")
    messages: Annotated[Messages, BeforeValidator(_read_messages)]
    system: Text = ""
    tools: Few[_Tool] = ()
    tool_choice: _ToolChoice | None = None
    output_config: _Effort | None = None
    context_management: _ContextManagement | None = None
    stop: Stops = Field((), validation_alias="stop_sequences")

    @property
    def parallel_tool_calls(self) -> bool:
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)

    def begin(self, find_turn: FindTurn) -> list[ConversationMessage]:
        return [ConversationMessage("system", self.system)] if self.system else []

    @classmethod
    def describe(cls, turn: Turn, request: PolicyRequest) -> Object:
        said = turn.messages[-1]
        blocks: list[Object] = [{"type": "thinking", "thinking": said.thought, "signature": ""}] if said.thought else []
        if said.content or not (said.thought or said.tool_calls):
            blocks.append({"type": "text", "text": said.content})
        for call in said.tool_calls:  # the interface expects objects
            value = parse_arguments(call.arguments or "{}")
            value = value if isinstance(value, dict) else {"arguments": value}
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
        ended = "max_tokens" if turn.generation.finish_reason == "length" else "stop_sequence" if turn.stop else "end_turn"
        return {
            "id": f"msg_{turn.number}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": blocks,
            "stop_reason": "tool_use" if said.tool_calls else ended,
            "stop_sequence": turn.stop or None,
            "usage": {
                "input_tokens": turn.prompt_tokens,
                "output_tokens": len(turn.generation.output_ids_T),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    @classmethod
    def list_events(cls, turn: Turn, request: PolicyRequest) -> list[Object]:
        whole = cls.describe(turn, request)
        begun = whole | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": whole["usage"] | {"output_tokens": 0}}
        events: list[Object] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(whole["content"]):
            name = block["type"]
            empty: Object = {"input": {}} if name == "tool_use" else {name: ""}
            delta = {"type": f"{name}_delta", name: block.get(name)}
            if name == "tool_use":
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events += [
                {"type": "content_block_start", "index": index, "content_block": block | empty},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ]
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        return [*events, {"type": "message_delta", "delta": end, "usage": whole["usage"]}, {"type": "message_stop"}]

    @classmethod
    def describe_error(cls, error: RefusedError) -> Object:
        kind = _ERRORS.get(error.status, "api_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
