"""HTTP endpoint for agents, reachable from this machine only: the interfaces of `FORMS` in front of the engines.

A client that leaves before its response is sent leaves its call to a retry for `_RETRY_SECONDS`; then the engine's request is aborted.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_rl.config.agent import AgentConfig
from megatron_rl.errors import AbortedError, RunError
from megatron_rl.rollout.agents.chat_forms import ChatForm, TextForm
from megatron_rl.rollout.agents.episode import CHARACTERS_PER_TOKEN, AgentEpisode, Turn
from megatron_rl.rollout.agents.forms import Form, encode, read_request
from megatron_rl.rollout.agents.messages import MODEL, PolicyRequest, RefusedError
from megatron_rl.rollout.agents.messages_form import MessagesForm
from megatron_rl.rollout.agents.responses_form import ResponsesForm
from megatron_rl.rollout.engine import Abort

_THREADS_PER_AGENT = 4
_READERS = 4  # threads that read and plan requests, which do not wait for an engine
_RETRY_SECONDS = 5.0  # longer than clients wait before they send a request again
_KEEP_ALIVE_SECONDS = 15.0  # between comments in a stream
_LOOP_TURNS = 20  # iterations of the event loop, after which all clients are noticed that have left before; about 6 are needed
_LEFT_STATUS = 499  # as nginx logs it
_MOST_REQUESTS = 64  # number of requests of an episode in flight
_BODY_BYTES, _BYTES_PER_TOKEN = 1 << 20, 4 * CHARACTERS_PER_TOKEN  # so many bytes a body may have, and per token
_MOST_BODIES, _DISCARDED = 4, 16  # as multiples of that: what an episode may have in flight, and what is read of a body
_FIRST_REQUEST_SECONDS = 10.0  # a connection without a request is closed after them; uvicorn limits the pauses between requests
_STOP_SECONDS = 10
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_COMMENT = b": the policy is at work\n\n"
_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron-rl"}
FORMS: tuple[type[Form], ...] = (ChatForm, TextForm, ResponsesForm, MessagesForm)
Answer = Callable[[AgentEpisode, Turn, Abort], None]
T = TypeVar("T")


class AgentEndpoint:
    """The HTTP server, a context manager. `answer` samples a turn of an episode; it may raise RefusedError or RunError."""

    def __init__(self, answer: Answer, agent: AgentConfig) -> None:
        self._answer, self._clients = answer, dict[str, _Client]()
        self._most_bytes = _BODY_BYTES + _BYTES_PER_TOKEN * agent.max_tokens
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="megatron-rl-agent-reader")
        self._threads = ThreadPoolExecutor(_THREADS_PER_AGENT * agent.workers, thread_name_prefix="megatron-rl-agent-request")
        routes = [
            *(Route(form.path, partial(self._answer_request, form), methods=["POST"]) for form in FORMS),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
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
        for threads in (self._readers, self._threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def open(self, episode: AgentEpisode) -> str:
        """Return a new key for an episode."""
        key = f"mrl-{secrets.token_hex(16)}"
        self._clients[key] = _Client(episode)
        return key

    def close(self, key: str) -> None:
        """End the episode's calls. Its key is invalid from now on."""
        client = self._clients.pop(key, None)
        for call in [*client.calls] if client else ():
            call.abort.request()

    async def _show_models(self, request: Request) -> Response:
        self._find_client(request)
        if (name := request.path_params.get("name", MODEL)) != MODEL:
            raise RefusedError(f"the model {name[:100]!r} does not exist", 404, "model_not_found")
        return JSONResponse(_MODEL if request.path_params else {"object": "list", "data": [_MODEL]})

    def _find_client(self, http: Request) -> _Client:
        key = http.headers.get("authorization", "").removeprefix("Bearer ")
        client = self._clients.get(key or http.headers.get("x-api-key", ""))  # Anthropic's clients send the latter
        if client is None:
            raise RefusedError("this key does not belong to a running episode", 401, "invalid_api_key")
        return client

    async def _answer_request(self, form: type[Form], http: Request) -> ASGIApp:
        client = self._find_client(http)
        try:
            async with client.receiving(http, self._most_bytes) as body:
                name, digest = http.headers.get("idempotency-key", ""), hashlib.sha256(form.path.encode() + b"\0" + body).digest()
                await _notice_who_left()
                if await http.is_disconnected():  # nobody waits, and a retry of it may be here already
                    return Response(status_code=_LEFT_STATUS)
                call = client.join(http, name, digest) or self._begin(client, form, body, name, digest)
                call.enter()
        except ClientDisconnect:
            return Response(status_code=_LEFT_STATUS)
        return partial(_deliver, client.episode, call, form)

    async def _count_tokens(self, http: Request) -> Response:
        client, form = self._find_client(http), _find_form(http.url.path)
        async with client.receiving(http, self._most_bytes) as body:
            run = asyncio.get_running_loop().run_in_executor
            number = await run(self._readers, self._read, client.episode, form, body, client.episode.count_tokens)
        return _make_refusal(form, number) if isinstance(number, RefusedError) else JSONResponse({"input_tokens": number})

    def _begin(self, client: _Client, form: type[Form], body: bytes, name: str, digest: bytes) -> _Call:
        run, call = asyncio.get_running_loop().run_in_executor, _Call(name, digest, self._readers)

        def plan(request: PolicyRequest) -> Turn:
            return client.episode.plan(request, lambda: call.listeners > 0)

        def sample(turn: Turn) -> bytes:
            self._answer(client.episode, turn, call.abort)
            return form.write(turn, turn.request)

        async def answer() -> bytes | RefusedError:
            result: Turn | bytes | RefusedError = await call.planned
            if isinstance(result, Turn):
                result = await run(self._threads, self._guard, client.episode, call.abort, partial(sample, result))
            if isinstance(result, RefusedError):
                client.calls.remove(call)  # it may be sent again
            return result

        call.planned = run(self._readers, self._read, client.episode, form, body, plan)
        call.answer = asyncio.ensure_future(answer())
        client.calls.append(call)
        return call

    def _read(self, episode: AgentEpisode, form: type[Form], body: bytes, use: Callable[[PolicyRequest], T]) -> T | RefusedError:
        """Read a request and return what `use` makes of it. Any error while it is read refuses it."""
        try:
            request = read_request(form, body, episode.find_turn)
        except RefusedError as error:
            return error.copy()
        except Exception as error:
            return RefusedError(f"the request cannot be read ({type(error).__name__})", code="invalid_value")
        return self._guard(episode, Abort(), lambda: use(request))

    def _guard(self, episode: AgentEpisode, abort: Abort, work: Callable[[], T]) -> T | RefusedError:
        """Return what `work` returns, or its refusal. Any other error is the run's, whatever its type: it ends the episode and is raised
        where the agent is awaited. No error leaves the thread, because its traceback would keep the parsed body in memory."""
        try:
            return work()
        except RefusedError as error:
            return error.copy()
        except Exception as error:
            if abort.requested and isinstance(error, AbortedError) and not episode.abort.requested:
                return RefusedError("the client has left", _LEFT_STATUS, "request_aborted")
            text = f"the agents' endpoint failed ({type(error).__name__}: {error})"
            episode.fail(error if isinstance(error, RunError | AbortedError) else RunError(text))
            return RefusedError("the run could not answer", 503, "run_failed")


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


@dataclass(eq=False)
class _Call:
    """A request and all clients that wait for its response. Used by the server's thread only."""

    name: str  # its idempotency key, or ""
    digest: bytes  # of its path and body
    threads: ThreadPoolExecutor  # in which it is aborted
    abort: Abort = field(default_factory=Abort)
    planned: asyncio.Future[Turn | RefusedError] = field(init=False)
    answer: asyncio.Future[bytes | RefusedError] = field(init=False)
    listeners: int = 0
    received: bool = False
    ending: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        self.listeners += 1
        if self.ending:
            self.ending.cancel()

    def leave(self) -> None:
        """Note that a client no longer waits. After the last one, the engine's request is aborted, unless another client comes."""
        self.listeners -= 1
        if not self.listeners and not self.answer.done():
            self.ending = asyncio.get_running_loop().call_later(_RETRY_SECONDS, self.threads.submit, self.abort.request)


class _Client:
    """What an episode's key admits to the endpoint. Used by the server's thread only."""

    def __init__(self, episode: AgentEpisode) -> None:
        self.episode, self.calls = episode, list[_Call]()
        self._receiving = self._bytes = 0

    def join(self, http: Request, name: str, digest: bytes) -> _Call | None:
        """Return the call that a request repeats, or None: the one of its idempotency key; a request with the same body whose client has
        left; or, if the client says that it tries again, any with the same body, those first whose response was not sent. Raise
        RefusedError if the key was used for another body. `name` and `digest`: see `_Call`."""
        if name:
            named = [call for call in self.calls if call.name == name]
            if named and named[0].digest != digest:
                raise RefusedError("Idempotency-Key: was sent with another request", 400, "idempotency_key_reused")
            return named[0] if named else None
        same = [call for call in self.calls if call.digest == digest]
        left = [call for call in same if not call.listeners and not call.received]
        if not left and http.headers.get("x-stainless-retry-count", "0") != "0":  # OpenAI's and Anthropic's clients
            left = [call for call in same if not call.received] or same
        return left[-1] if left else None

    @asynccontextmanager
    async def receiving(self, http: Request, most: int) -> AsyncIterator[bytes]:
        """Enclose a request, and yield its body. Raise RefusedError if the episode has too many requests or bytes in flight, or if the body
        has more than `most` bytes. Such a body is read to its end, so that its client, which is still sending, gets the answer."""
        if self._receiving + sum(max(call.listeners, not call.answer.done()) for call in self.calls) >= _MOST_REQUESTS:
            raise RefusedError(f"this episode has {_MOST_REQUESTS} requests in flight", 429, "rate_limit_exceeded")
        body, size = bytearray(), 0
        self._receiving += 1
        try:
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
            finally:
                self._receiving -= 1
            if size > most:
                raise RefusedError(f"the body of {size} bytes or more is larger than {most}", 413, "request_too_large")
            yield bytes(body)
        finally:
            self._bytes -= len(body)


async def _deliver(episode: AgentEpisode, call: _Call, form: type[Form], scope: Scope, receive: Receive, send: Send) -> None:
    """Send the response to one client that waits for a call. The headers of a stream are sent at once, and comments until its events
    follow."""
    gone: asyncio.Future[Any] = asyncio.ensure_future(_wait_until_gone(receive))
    stream = False
    try:
        either: list[asyncio.Future[Any]] = [call.planned, gone]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not gone.done() and isinstance(turn := call.planned.result(), Turn) and (stream := turn.request.stream):
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        either[0] = call.answer
        while not (call.answer.done() or gone.done()):
            if stream:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            await asyncio.wait(either, timeout=_KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        await _notice_who_left(gone)
        if gone.done():
            return
        result = call.answer.result()
        if isinstance(result, bytes):
            assert isinstance(turn, Turn)
            episode.receive(turn)
            call.received = True
        if stream:
            body = result if isinstance(result, bytes) else encode([form.describe_error(result)])
            await send({"type": "http.response.body", "body": body})
        else:
            response = Response(result, media_type="application/json") if isinstance(result, bytes) else _make_refusal(form, result)
            await response(scope, receive, send)
    finally:
        gone.cancel()
        call.leave()


async def _notice_who_left(gone: asyncio.Future[None] | None = None) -> None:
    """Let the loop handle the connections that were closed before now, or until `gone` is done. A pause in seconds would not do, because on
    a busy machine it could end first."""
    for _ in range(_LOOP_TURNS):
        if gone and gone.done():
            return
        await asyncio.sleep(0)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(http: Request, error: Exception) -> Response:
    """Answer a refused request, or one with an unknown path or method, as OpenAI or Anthropic does."""
    if isinstance(error, HTTPException):
        code = "method_not_supported" if error.status_code == 405 else "unknown_url"
        error = RefusedError(f"invalid URL ({http.method} {http.url.path[:200]})", error.status_code, code)
    assert isinstance(error, RefusedError)
    return _make_refusal(_find_form(http.url.path), error)


def _make_refusal(form: type[Form], error: RefusedError) -> Response:
    return JSONResponse(form.describe_error(error), error.status)


def _find_form(path: str) -> type[Form]:
    """Return the form that answers requests to a path, or that of chat completions, whose errors are those of unknown paths."""
    return next((form for form in FORMS if path == form.path or path.startswith(f"{form.path}/")), ChatForm)
