"""Access to an engine's HTTP server: every request needs the key of `process.API_KEY_VARIABLE`. SGLang does not get the key as its
`--api-key`, because it prints its arguments to the engine's log, where the log level lets it."""

import secrets
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

_PUBLIC = ("/health", "/ready", "/metrics")
"""Prefixes of endpoints that only tell whether the engine is alive. SGLang does not protect them either."""
_FREEZE_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Seconds after which clients close an idle connection."""
SERVER_KEEP_ALIVE_SECONDS = 120
"""The same for the server, which must not close a connection while a request is on its way, even if the network is down for a while."""

_headers: dict[str, str] = {}


class KeyCheck:
    """ASGI middleware that refuses requests without the key."""

    def __init__(self, app: Callable[..., Awaitable[None]], key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._is_allowed(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": httpx.codes.UNAUTHORIZED, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await send({"type": "websocket.close"})

    def _is_allowed(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        given += [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]  # Anthropic's clients
        return scope["path"].startswith(_PUBLIC) or (len(given) == 1 and secrets.compare_digest(given[0], self._expected))


def require_key(app: Any, key: str) -> None:
    """Let a server that has not started yet refuse requests without the key. Raise ValueError for an empty key."""
    if not key:
        raise ValueError("the engine's key is empty")
    app.add_middleware(KeyCheck, key=key)
    _headers["Authorization"] = f"Bearer {key}"


def freeze_with_key(server_args: Any) -> None:
    """Replace `_freeze_gc_after_server_warmup`, which sends SGLang's `--api-key`."""
    try:
        httpx.post(f"{server_args.url()}/freeze_gc", headers=_headers, timeout=_FREEZE_SECONDS, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        print(f"the garbage collector was not frozen ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
