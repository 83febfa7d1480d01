"""The engine's server answers this project's clients: in columns, with texts, and perhaps without the columns, which it keeps."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rollout_sglang.answers import MEDIA_TYPE, pack_answers
from rollout_sglang.remote_columns import read_place, store
from rollout_sglang.texts import make_text_reader


async def answer_in_columns(original: Callable[..., Awaitable[Any]], request_of_client: Any, request: Any) -> Any:
    """Wrap `serve_generate_request`: answer clients that accept `MEDIA_TYPE` in columns, with SGLang's own errors."""
    if MEDIA_TYPE not in request.headers.get("accept", "") or request_of_client.stream:
        return await original(request_of_client, request)
    from sglang.srt.entrypoints import http_server
    from starlette.responses import Response

    manager = http_server._global_state.tokenizer_manager
    read_text = make_text_reader(request.headers, request_of_client.sampling_params, Path(manager.server_args.model_path))
    try:
        answers = await manager.generate_request(request_of_client, request).__anext__()
    except ValueError as error:
        return http_server._create_error_response(error)
    place = read_place(request.headers)
    leave = functools.partial(store.leave, place=place[0], staleness=place[1])
    content = await asyncio.to_thread(pack_answers, answers, read_text, leave)  # other requests go on meanwhile
    return Response(content, media_type=MEDIA_TYPE)
