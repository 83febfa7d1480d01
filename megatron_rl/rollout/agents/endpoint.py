"""HTTP endpoint for agents, reachable from this machine only: OpenAI's chat completions and responses in front of the engines."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_rl.errors import RunError
from megatron_rl.rollout.agents.episode import AgentEpisode, Turn
from megatron_rl.rollout.agents.messages import PolicyRequest, RefusedError, read_chat_request, read_response_request

MODEL = "policy"  # model name that the endpoint reports; requests may use any name
_THREADS_PER_AGENT = 4
_STOP_SECONDS = 10
Answer = Callable[[AgentEpisode, PolicyRequest], Turn]


class AgentEndpoint:
    """The HTTP server, a context manager. `answer` samples a turn of an episode; it may raise RefusedError or RunError."""

    def __init__(self, answer: Answer, agents: int) -> None:
        self._answer, self._episodes = answer, dict[str, AgentEpisode]()
        self._threads = ThreadPoolExecutor(_THREADS_PER_AGENT * agents, thread_name_prefix="megatron-rl-agent-request")
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/responses", self._respond, methods=["POST"]),
            Route("/v1/models", self._list_models, methods=["GET"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)

    def __enter__(self) -> AgentEndpoint:
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="megatron-rl-agents", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._episodes.clear()
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def open(self, episode: AgentEpisode) -> str:
        """Return a new key for an episode."""
        key = f"mrl-{secrets.token_hex(16)}"
        self._episodes[key] = episode
        return key

    def close(self, key: str) -> None:
        self._episodes.pop(key, None)

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-rl"}]})

    async def _complete(self, request: Request) -> Response:
        def answer(episode: AgentEpisode, body: Any) -> Response:
            turn = self._answer(episode, read_chat_request(body))
            completion = _describe_completion(turn, episode.number_of(turn), _name_model(body))
            return _stream(completion) if body.get("stream") else JSONResponse(completion)

        return await self._handle(request, answer)

    async def _respond(self, request: Request) -> Response:
        def answer(episode: AgentEpisode, body: Any) -> Response:
            previous = body.get("previous_response_id") if isinstance(body, dict) else None
            number = str(previous).removeprefix("resp_")
            earlier = episode.find_turn(int(number) if number.isdecimal() else -1).messages if previous else ()
            turn = self._answer(episode, read_response_request(body, earlier))
            return JSONResponse(_describe_response(turn, episode.number_of(turn), body))

        return await self._handle(request, answer)

    async def _handle(self, request: Request, answer: Callable[[AgentEpisode, Any], Response]) -> Response:
        """Answer a request in a thread. An error of the run ends the episode and is raised where the agent is awaited."""
        episode = self._episodes.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        try:
            if episode is None:
                raise RefusedError("this key does not belong to a running episode", 401, "invalid_api_key")
            try:
                body = await request.json()
            except ValueError:
                raise RefusedError("the body is not JSON", code="invalid_value") from None
            return await asyncio.get_running_loop().run_in_executor(self._threads, answer, episode, body)
        except ClientDisconnect:
            return Response(status_code=499)
        except RefusedError as error:
            return _describe_error(str(error), error.status, error.code)
        except Exception as error:
            if episode is not None:
                text = f"the agents' endpoint failed ({type(error).__name__}: {error})"
                episode.fail(error if isinstance(error, RunError) else RunError(text))
            return _describe_error("the run could not answer", 503, "run_failed")


def _describe_error(message: str, status: int, code: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status)


def _name_model(body: Any) -> str:
    return str(body.get("model") or MODEL)


def _describe_completion(turn: Turn, number: int, model: str) -> dict[str, Any]:
    said, before, sampled = turn.messages[-1], turn.prompt_tokens, len(turn.generation.output_ids_T)
    message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if said.tool_calls else "")}
    if said.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in said.tool_calls]
    finish = "tool_calls" if said.tool_calls else turn.generation.finish_reason
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish, "logprobs": None}],
        "usage": {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled},
    }


def _stream(completion: dict[str, Any]) -> Response:
    """Return a completion as a stream whose first chunk holds the whole text."""
    choice = completion["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    common = {name: completion[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}], "usage": completion["usage"]},
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    return StreamingResponse(iter(lines), media_type="text/event-stream")


def _describe_response(turn: Turn, number: int, body: Any) -> dict[str, Any]:
    said, before, sampled = turn.messages[-1], turn.prompt_tokens, len(turn.generation.output_ids_T)
    cut = turn.generation.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if said.content or not said.tool_calls:
        text = {"type": "output_text", "text": said.content, "annotations": []}
        output.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": [text]})
    for call in said.tool_calls:
        named = {"id": f"fc_{call.id}", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        output.append({"type": "function_call", "status": "completed", **named})
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": _name_model(body),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {"input_tokens": before, "output_tokens": sampled, "total_tokens": before + sampled, **details},
    }
