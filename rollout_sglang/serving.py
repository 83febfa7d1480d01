"""What `megatron-rl serve` adds to SGLang's own interfaces, so that a policy is served as it was trained."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

OPTIONS_VARIABLE = "MEGATRON_RL_REQUEST_OPTIONS"
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_CHAT_ONLY = ("chat_template_kwargs",)


class DefaultOptions:
    """ASGI middleware that gives requests the options that they leave out."""

    def __init__(self, app: Callable[..., Awaitable[None]], options: Mapping[str, Any]) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in _PATHS:
            options = {name: value for name, value in self._options.items() if name not in _CHAT_ONLY or scope["path"] == _PATHS[0]}
            scope, receive = await _fill(scope, receive, options)
        await self._app(scope, receive, send)


async def _fill(scope: Any, receive: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the request with the options. A body that is no JSON object stays as it is, for SGLang to refuse."""
    body, message = b"", {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    try:
        values = json.loads(body)
        body = json.dumps({**values, **{name: each for name, each in options.items() if values.get(name) is None}}).encode()
    except (ValueError, AttributeError, TypeError):
        pass
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]

    async def replay() -> Any:
        return parts.pop() if parts else await receive()

    return {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}, replay


def opens_thought(original: Callable[..., bool], chat: Any, request: Any) -> bool:
    """Wrap `_get_reasoning_from_request`: a response begins inside a thought if the template has opened one, as for agents. SGLang goes by
    the parser's name."""
    from megatron_rl.rewards.thinking import find_markers

    tokenizer, options = chat.tokenizer_manager.tokenizer, request.chat_template_kwargs or {}
    question = [{"role": "user", "content": "?"}]
    if not getattr(tokenizer, "chat_template", None):
        return original(chat, request)
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **options)
    return str(prompt).rstrip().endswith(find_markers(tokenizer.chat_template)[0])


def keep_text_without_calls(original: Callable[..., Any], chat: Any, text: str, *args: Any, **named: Any) -> Any:
    """Wrap `_process_tool_calls`: a response without a call that can be read is text, as for agents, which SGLang would cut."""
    result = original(chat, text, *args, **named)
    return result if result.tool_calls else result._replace(remaining_text=text)
