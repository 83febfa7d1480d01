"""The interfaces of the endpoint: how each reads its requests into `PolicyRequest`, and how it writes the turn that answers one. Responses
come in one piece, also in a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.responses import JSONResponse, Response

from megatron_rl.rollout.agents import messages_form, responses_form
from megatron_rl.rollout.agents.episode import Turn
from megatron_rl.rollout.agents.messages import PolicyRequest, RefusedError
from megatron_rl.rollout.agents.requests import ChatRequest, Request, TextRequest

Object = dict[str, Any]


class Form(NamedTuple):
    """One interface."""

    path: str
    model: type[Request]
    describe: Callable[[Turn, PolicyRequest], Object]
    stream: Callable[[Turn, PolicyRequest], list[Object]]
    describe_error: Callable[[RefusedError], Object]
    has_types: bool  # whether events have a `type`, which names them; else `[DONE]` is the last

    def refuse(self, error: RefusedError) -> Response:
        return JSONResponse(self.describe_error(error), error.status)

    def write(self, turn: Turn, request: PolicyRequest) -> bytes:
        return self.encode(self.stream(turn, request)) if request.stream else json.dumps(self.describe(turn, request)).encode()

    def encode(self, events: list[Object]) -> bytes:
        """Return the text of a stream's events."""
        names = [f"event: {event['type']}\n" if self.has_types else "" for event in events]
        lines = [f"{name}data: {json.dumps(event)}\n\n" for name, event in zip(names, events, strict=True)]
        return "".join([*lines, *([] if self.has_types else ["data: [DONE]\n\n"])]).encode()


def _describe_chat(turn: Turn, request: PolicyRequest) -> Object:
    said = turn.messages[-1]
    message: Object = {"role": "assistant", "content": said.content or (None if said.tool_calls else "")}
    message |= {"reasoning_content": said.thought} if said.thought else {}
    message |= {"tool_calls": [call.to_openai() for call in said.tool_calls]} if said.tool_calls else {}
    return _describe("chatcmpl", "chat.completion", turn, request, {"message": message})


def _stream_chat(turn: Turn, request: PolicyRequest) -> list[Object]:
    delta = _describe_chat(turn, request)["choices"][0]["message"]
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    return _stream("chatcmpl", "chat.completion.chunk", turn, request, [{"delta": delta}, {"delta": {}}])


def _describe_text(turn: Turn, request: PolicyRequest) -> Object:
    return _describe("cmpl", "text_completion", turn, request, {"text": turn.messages[-1].content})


def _stream_text(turn: Turn, request: PolicyRequest) -> list[Object]:
    return _stream("cmpl", "text_completion", turn, request, [{"text": turn.messages[-1].content}, {"text": ""}])


def _describe(name: str, kind: str, turn: Turn, request: PolicyRequest, part: Object) -> Object:
    """Return a response of OpenAI's completions with one choice, and its end as SGLang describes it: the stop text or the end token."""
    before, sampled = turn.prompt_tokens, turn.generation.output_ids_T
    token = int(sampled[-1]) if len(sampled) and turn.generation.finish_reason == "stop" else None
    finish = "tool_calls" if turn.messages[-1].tool_calls else turn.generation.finish_reason
    usage = {"prompt_tokens": before, "completion_tokens": len(sampled), "total_tokens": before + len(sampled)}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": finish, "matched_stop": turn.stop or token}
    start = {"id": f"{name}-{turn.number}", "object": kind, "created": int(time.time()), "model": request.model}
    return {**start, "choices": [choice], "usage": usage}


def _stream(name: str, kind: str, turn: Turn, request: PolicyRequest, parts: list[Object]) -> list[Object]:
    """Return the chunks of a response, whose last part has its end."""
    chunks = [_describe(name, kind, turn, request, part) for part in parts]
    for chunk in chunks[:-1]:
        chunk["choices"][0] |= {"finish_reason": None, "matched_stop": None}
    if request.include_usage:
        return [*({**chunk, "usage": None} for chunk in chunks), {**chunks[-1], "choices": []}]
    return [{name: value for name, value in chunk.items() if name != "usage"} for chunk in chunks]


def _describe_error(error: RefusedError) -> Object:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def _describe_response_error(error: RefusedError) -> Object:
    """Return an error that is also the last event of a stream."""
    parts = _describe_error(error)["error"]
    return {"type": "error", "sequence_number": 0, **{name: parts[name] for name in ("code", "message", "param")}, "error": parts}


_CHAT = Form("/v1/chat/completions", ChatRequest, _describe_chat, _stream_chat, _describe_error, False)
FORMS = (
    _CHAT,
    Form("/v1/completions", TextRequest, _describe_text, _stream_text, _describe_error, False),
    Form("/v1/responses", responses_form.ResponseRequest, responses_form.describe, responses_form.stream, _describe_response_error, True),
    Form("/v1/messages", messages_form.MessagesRequest, messages_form.describe, messages_form.stream, messages_form.describe_error, True),
)


def find_form(path: str) -> Form:
    """Return the form that answers requests to a path, or that of chat completions, whose errors are those of unknown paths."""
    return next((form for form in FORMS if path == form.path or path.startswith(f"{form.path}/")), _CHAT)
