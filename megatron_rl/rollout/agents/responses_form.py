"""OpenAI's interface of responses: /v1/responses, also streamed as typed events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megatron_rl.rollout.agents.chat_forms import OpenAIForm
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.forms import Count, Few, FindTurn, Function, Messages, Object
from megatron_rl.rollout.agents.messages import ConversationMessage, PolicyRequest, RefusedError


def _read_item(item: Any) -> Any:
    """Return an item of a response's input as a message of chat completions."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind == "message":
        return item
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": {name: item.get(name) for name in ("name", "arguments")}}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": item.get("content")}
    raise RefusedError(f"input: items of type {json.dumps(kind)[:100]} are not supported")


def _read_items(value: Any) -> Any:
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return [_read_item(item) for item in items] if isinstance(items, list) else items


def _merge(messages: Sequence[ConversationMessage]) -> tuple[ConversationMessage, ...]:
    """Merge thought, text, and calls of one response into one message."""
    merged = list[ConversationMessage]()
    for message in messages:
        last = merged[-1] if merged else message
        if merged and last.role == message.role == "assistant" and (message.tool_calls or not (last.content or last.tool_calls)):
            content, calls = last.content + message.content, last.tool_calls + message.tool_calls
            message = ConversationMessage("assistant", content, calls, thought=last.thought + message.thought)
            merged.pop()
        merged.append(message)
    return tuple(merged)


class _Tool(Function):
    type: Literal["function"]


class ResponsesForm(OpenAIForm):
    path = "/v1/responses"
    decided = (*OpenAIForm.decided, "reasoning")
    labels = (*OpenAIForm.labels, "client_metadata")
    messages: Annotated[Messages, BeforeValidator(_read_items), AfterValidator(_merge)] = Field(validation_alias="input")
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    max_tokens: Count | None = Field(None, validation_alias="max_output_tokens")
    tools: Few[_Tool] = ()
    parallel_tool_calls: bool = True
    truncation: Literal["disabled"] = "disabled"
    include: Few[Literal["reasoning.encrypted_content"]] = ()

    def begin(self, find_turn: FindTurn) -> list[ConversationMessage]:
        earlier = find_turn(self.previous_response_id).messages if self.previous_response_id else ()
        if not self.instructions:
            return [*earlier]
        return [ConversationMessage("system", self.instructions), *(message for message in earlier if message.role != "system")]

    @classmethod
    def describe(cls, turn: Turn, request: PolicyRequest) -> Object:
        said, before, sampled = turn.messages[-1], turn.prompt_tokens, len(turn.generation.output_ids_T)
        cut = turn.generation.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        output: list[Object] = []
        if said.thought:
            thought = {"type": "reasoning_text", "text": said.thought}
            output.append({"type": "reasoning", "id": f"rs_{turn.number}", "status": "completed", "summary": [], "content": [thought]})
        if said.content or not said.tool_calls:
            text = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
            output.append({"type": "message", "id": f"msg_{turn.number}", "role": "assistant", "status": status, "content": [text]})
        for call in said.tool_calls:
            named = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            output.append({"type": "function_call", "status": "completed", **named})
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return {
            "id": f"resp_{turn.number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "instructions": request.instructions,
            "metadata": {},
            "output": output,
            "parallel_tool_calls": request.parallel_calls,
            "tool_choice": "auto" if request.calls_tools else "none",
            "tools": [{"type": "function", **tool["function"]} for tool in json.loads(request.tools)],
            "usage": {"input_tokens": before, "output_tokens": sampled, "total_tokens": before + sampled, **details},
        }

    @classmethod
    def list_events(cls, turn: Turn, request: PolicyRequest) -> list[Object]:
        whole = cls.describe(turn, request)
        begun = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[Object] = []

        def add(kind: str, **values: Any) -> None:
            events.append({"type": f"response.{kind}", **values, "sequence_number": len(events)})

        add("created", response=begun)
        add("in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            empty: Object = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
            place: Object = {"item_id": item["id"], "output_index": index}
            add("output_item.added", output_index=index, item=item | empty | {"status": "in_progress"})
            for part in item.get("content", ()):
                kind, place = part["type"], place | {"content_index": 0}
                records: Object = {"logprobs": []} if "logprobs" in part else {}
                add("content_part.added", **place, part=part | {"text": ""})
                add(f"{kind}.delta", **place, delta=part["text"], **records)
                add(f"{kind}.done", **place, text=part["text"], **records)
                add("content_part.done", **place, part=part)
            if item["type"] == "function_call":
                add("function_call_arguments.delta", **place, delta=item["arguments"])
                add("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
            add("output_item.done", output_index=index, item=item)
        add(whole["status"], response=whole)
        return events

    @classmethod
    def describe_error(cls, error: RefusedError) -> Object:
        """Return an error that is also the last event of a stream."""
        parts = super().describe_error(error)["error"]
        return {"type": "error", "sequence_number": 0, **{name: parts[name] for name in ("code", "message", "param")}, "error": parts}
