"""HTTP endpoint for agents, reachable from this machine only: OpenAI's completions and responses in front of the engines."""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_rl.config.agent import AgentConfig
from megatron_rl.errors import AbortedError, RunError
from megatron_rl.rollout.agents.episode import CHARACTERS_PER_TOKEN, AgentEpisode, Turn
from megatron_rl.rollout.agents.messages import MODEL, PolicyRequest, RefusedError
from megatron_rl.rollout.agents.requests import read_chat_request, read_response_request, read_text_request

_THREADS_PER_AGENT = 4
_MOST_REQUESTS = 64  # number of requests of an episode in flight
_BODY_BYTES, _BYTES_PER_TOKEN = (
    1 << 20,
    4 * CHARACTERS_PER_TOKEN,
)  # so many bytes a body may have, and per token
_MOST_BODIES, _DISCARDED = 4, 16  # as multiples of that: what an episode may have in flight, and what is read of a body
_FIRST_REQUEST_SECONDS = 10.0  # a connection without a request is closed after them; uvicorn limits the pauses between requests
_STOP_SECONDS = 10
_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-rl"}
Answer = Callable[[AgentEpisode, PolicyRequest], Turn]
Read = Callable[[AgentEpisode, bytes], PolicyRequest]
Describe = Callable[[Turn, int, PolicyRequest], Response]


class AgentEndpoint:
    """The HTTP server, a context manager. `answer` samples a turn of an episode; it may raise RefusedError or RunError."""

    def __init__(self, answer: Answer, agent: AgentConfig) -> None:
        self._answer, self._clients = answer, dict[str, _Client]()
        self._most_bytes = _BODY_BYTES + _BYTES_PER_TOKEN * agent.max_tokens
        self._threads = ThreadPoolExecutor(_THREADS_PER_AGENT * agent.workers, thread_name_prefix="megatron-rl-agent-request")
        routes = [
            *(Route(path, partial(self._answer_request, *form), methods=["POST"]) for path, form in _FORMS.items()),
            Route("/v1/models", self._show_models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._show_models, methods=["GET"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={RefusedError: _refuse, HTTPException: _refuse}),
            http=_limit_connections(_MOST_REQUESTS * agent.workers),
            log_config=None,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)

    def __enter__(self) -> AgentEndpoint:
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="megatron-rl-agents", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.clear()
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def open(self, episode: AgentEpisode) -> str:
        """Return a new key for an episode."""
        key = f"mrl-{secrets.token_hex(16)}"
        self._clients[key] = _Client(episode)
        return key

    def close(self, key: str) -> None:
        self._clients.pop(key, None)

    async def _show_models(self, request: Request) -> Response:
        self._find_client(request)
        if (name := request.path_params.get("name", MODEL)) != MODEL:
            raise RefusedError(f"the model {name[:100]!r} does not exist", 404, "model_not_found")
        return JSONResponse(_MODEL if request.path_params else {"object": "list", "data": [_MODEL]})

    def _find_client(self, http: Request) -> _Client:
        client = self._clients.get(http.headers.get("authorization", "").removeprefix("Bearer "))
        if client is None:
            raise RefusedError("this key does not belong to a running episode", 401, "invalid_api_key")
        return client

    async def _answer_request(self, read: Read, describe: Describe, http: Request) -> Response:
        client = self._find_client(http)
        try:
            async with client.receiving(http, self._most_bytes) as body:
                return await asyncio.get_running_loop().run_in_executor(self._threads, self._serve, client.episode, body, read, describe)
        except ClientDisconnect:
            return Response(status_code=499)

    def _serve(self, episode: AgentEpisode, body: bytes, read: Read, describe: Describe) -> Response:
        """Answer a request in a thread. An error while the request is read refuses it. Any later error that is not a RefusedError is the
        run's, whatever its type: it ends the episode and is raised where the agent is awaited. No error leaves the thread, because its
        traceback would keep the parsed body in memory."""
        try:
            request = read(episode, body)
        except RefusedError as error:
            return _describe_error(error)
        except Exception as error:
            return _describe_error(RefusedError(f"the request cannot be read ({type(error).__name__})", code="invalid_value"))
        try:
            turn = self._answer(episode, request)
            return describe(turn, episode.number_of(turn), request)
        except RefusedError as error:
            return _describe_error(error)
        except Exception as error:
            text = f"the agents' endpoint failed ({type(error).__name__}: {error})"
            episode.fail(error if isinstance(error, RunError | AbortedError) else RunError(text))
            return _describe_error(RefusedError("the run could not answer", 503, "run_failed"))


def _limit_connections(most: int) -> type[H11Protocol]:
    """Return uvicorn's protocol for at most `most` open connections, and at most half of the files that this process may open. A further
    one is closed at once, so that agents cannot exhaust what the run needs."""
    limit = min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    class LimitedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limit:
                transport.abort()
            else:
                self.loop.call_later(_FIRST_REQUEST_SECONDS, self._close_without_request)

        def _close_without_request(self) -> None:
            if self.cycle is None:
                self.transport.close()

    return LimitedProtocol


class _Client:
    """What an episode's key admits to the endpoint. Used by the server's thread only."""

    def __init__(self, episode: AgentEpisode) -> None:
        self.episode, self._requests, self._bytes = episode, 0, 0

    @asynccontextmanager
    async def receiving(self, http: Request, most: int) -> AsyncIterator[bytes]:
        """Enclose a request, and yield its body. Raise RefusedError if the episode has too many requests or bytes in flight, or if the body
        has more than `most` bytes. Such a body is read to its end, so that its client, which is still sending, gets the answer."""
        if self._requests == _MOST_REQUESTS:
            raise RefusedError(f"this episode has {_MOST_REQUESTS} requests in flight", 429, "rate_limit_exceeded")
        self._requests += 1
        body, size = bytearray(), 0
        try:
            async for chunk in http.stream():
                size += len(chunk)
                if size > _DISCARDED * most:
                    break
                if size <= most:
                    body += chunk
                    self._bytes += len(chunk)
                    if self._bytes > _MOST_BODIES * most:
                        raise RefusedError("this episode has too many large requests in flight", 429, "rate_limit_exceeded")
            if size > most:
                raise RefusedError(f"the body of {size} bytes or more is larger than {most}", 413, "request_too_large")
            yield bytes(body)
        finally:
            self._requests -= 1
            self._bytes -= len(body)


def _describe_error(error: RefusedError) -> Response:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return JSONResponse({"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}, error.status)


async def _refuse(http: Request, error: Exception) -> Response:
    """Answer a refused request, or one with an unknown path or method, as OpenAI does."""
    if isinstance(error, HTTPException):
        code = "method_not_supported" if error.status_code == 405 else "unknown_url"
        error = RefusedError(f"invalid URL ({http.method} {http.url.path[:200]})", error.status_code, code)
    assert isinstance(error, RefusedError)
    return _describe_error(error)


def _describe_completion(turn: Turn, number: int, request: PolicyRequest) -> Response:
    said = turn.messages[-1]
    message: dict[str, Any] = {"role": "assistant", "content": said.content or (None if said.tool_calls else "")}
    delta = dict(message)
    if said.tool_calls:
        message["tool_calls"] = [call.to_openai() for call in said.tool_calls]
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(message["tool_calls"])]
    common = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk" if request.stream else "chat.completion"}
    finish = "tool_calls" if said.tool_calls else turn.generation.finish_reason
    return _describe_choice(turn, request, common, finish, [{"delta": delta}, {"delta": {}}] if request.stream else [{"message": message}])


def _describe_text(turn: Turn, number: int, request: PolicyRequest) -> Response:
    common, text = {"id": f"cmpl-{number}", "object": "text_completion"}, {"text": turn.messages[-1].content}
    return _describe_choice(turn, request, common, turn.generation.finish_reason, [text, {"text": ""}] if request.stream else [text])


def _describe_choice(turn: Turn, request: PolicyRequest, common: dict[str, Any], finish: str, parts: list[dict[str, Any]]) -> Response:
    """Return a completion, or a stream whose first chunk holds the whole text. `parts`: what the choice of each chunk holds."""
    before, sampled = turn.prompt_tokens, len(turn.generation.output_ids_T)
    ended = bool(sampled) and turn.generation.finish_reason == "stop"
    matched = turn.stop or (int(turn.generation.output_ids_T[-1]) if ended else None)  # as SGLang answers: the stop text or the end token
    usage = {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}
    common |= {"created": int(time.time()), "model": request.model}
    ends = [{"finish_reason": None}] * (len(parts) - 1) + [{"finish_reason": finish, "matched_stop": matched}]
    chunks = [{**common, "choices": [{"index": 0, **part, "logprobs": None, **end}]} for part, end in zip(parts, ends, strict=True)]
    if not request.stream:
        return JSONResponse({**chunks[0], "usage": usage})
    if request.include_usage:
        chunks = [{**chunk, "usage": None} for chunk in chunks] + [{**common, "choices": [], "usage": usage}]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    return StreamingResponse(iter(lines), media_type="text/event-stream")


def _describe_response(turn: Turn, number: int, request: PolicyRequest) -> Response:
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
    response = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": request.instructions,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto" if request.calls_tools else "none",
        "tools": [{"type": "function", **tool["function"]} for tool in json.loads(request.tools)],
        "usage": {"input_tokens": before, "output_tokens": sampled, "total_tokens": before + sampled, **details},
    }
    return JSONResponse(response)


_FORMS: dict[str, tuple[Read, Describe]] = {
    "/v1/chat/completions": (lambda _, body: read_chat_request(body), _describe_completion),
    "/v1/completions": (lambda _, body: read_text_request(body), _describe_text),
    "/v1/responses": (lambda episode, body: read_response_request(body, lambda name: episode.find_turn(name).messages), _describe_response),
}
"""Path -> what reads a request and describes the turn that answers it."""
