"""OpenAI's interface of responses: /v1/responses, also streamed as typed events."""

import json
import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_rl.rollout.agents import requests
from megatron_rl.rollout.agents.episode import AgentEpisode, Turn
from megatron_rl.rollout.agents.messages import ConversationMessage, PolicyRequest, RefusedError, ToolCall


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class _Tool(requests.Function):
    type: Literal["function"]


class _CallItem(requests.CalledFunction):
    call_id: requests.Name


class _OutputItem(requests.Model):
    output: Annotated[str, BeforeValidator(requests.join_texts)] = ""
    call_id: requests.Name | None = None


class _ReasoningItem(requests.Model):
    content: Annotated[str, BeforeValidator(requests.join_texts)] = ""


class ResponseRequest(requests.OpenAIRequest):
    """A request to /v1/responses."""

    decided = (*requests.OpenAIRequest.decided, "reasoning")
    labels = (*requests.OpenAIRequest.labels, "client_metadata")
    input: Annotated[list[dict[str, Any]], Field(max_length=10_000, fail_fast=True), BeforeValidator(_as_items)]
    tools: requests.Few[_Tool] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=64)] | None = None
    max_output_tokens: requests.Count | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None

    def convert(self, episode: AgentEpisode) -> PolicyRequest:
        messages = [ConversationMessage("system", self.instructions)] if self.instructions else []
        earlier = episode.find_turn(self.previous_response_id).messages if self.previous_response_id else ()
        messages += [message for message in earlier if not (messages and message.role == "system")]
        for item in self.input:
            _append_item(messages, item)
        return self.make(messages, self.tools or (), self.max_output_tokens, instructions=self.instructions)


def _append_item(messages: list[ConversationMessage], item: dict[str, Any]) -> None:
    """Add one item of a response's input. Thought, text, and calls of one response are merged into one message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        reply = requests.validate(_OutputItem, item, "input")
        messages.append(ConversationMessage("tool", reply.output, tool_call_id=reply.call_id or ""))
        return
    if kind == "message":
        message = requests.validate(requests.Message, item, "input").convert()
    elif kind == "function_call":
        call = requests.validate(_CallItem, item, "input")
        message = ConversationMessage("assistant", tool_calls=(ToolCall(call.call_id, call.name, call.arguments),))
    elif kind == "reasoning":
        message = ConversationMessage("assistant", thought=requests.validate(_ReasoningItem, item, "input").content)
    else:
        raise RefusedError(f"input: items of type {json.dumps(kind)[:100]} are not supported")
    last = messages[-1] if messages else None
    if last is not None and last.role == message.role == "assistant" and (message.tool_calls or not (last.content or last.tool_calls)):
        content, calls = last.content + message.content, last.tool_calls + message.tool_calls
        message = ConversationMessage("assistant", content, calls, thought=last.thought + message.thought)
        messages.pop()
    messages.append(message)


def describe(turn: Turn, request: PolicyRequest) -> dict[str, Any]:
    said, before, sampled = turn.messages[-1], turn.prompt_tokens, len(turn.generation.output_ids_T)
    cut = turn.generation.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
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


def stream(turn: Turn, request: PolicyRequest) -> list[dict[str, Any]]:
    whole = describe(turn, request)
    begun = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    for index, item in enumerate(whole["output"]):
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        events.append({"type": "response.output_item.added", "output_index": index, "item": item | empty | {"status": "in_progress"}})
        place = {"item_id": item["id"], "output_index": index}
        for part in item.get("content", ()):
            kind, place = f"response.{part['type']}", place | {"content_index": 0}
            records: dict[str, Any] = {"logprobs": []} if "logprobs" in part else {}
            events += [
                {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
                {"type": f"{kind}.delta", **place, "delta": part["text"], **records},
                {"type": f"{kind}.done", **place, "text": part["text"], **records},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        if item["type"] == "function_call":
            kind = "response.function_call_arguments"
            events.append({"type": f"{kind}.delta", **place, "delta": item["arguments"]})
            events.append({"type": f"{kind}.done", **place, "name": item["name"], "arguments": item["arguments"]})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return [event | {"sequence_number": index} for index, event in enumerate(events)]
