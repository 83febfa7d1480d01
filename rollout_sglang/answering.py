"""The engine's server answers this project's clients: in columns, with texts, and perhaps without the columns, which it keeps."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rollout_sglang.answers import MEDIA_TYPE, Answer, pack_answers
from rollout_sglang.remote_columns import read_place, store
from rollout_sglang.texts import make_text_reader


async def answer_in_columns(original: Callable[..., Awaitable[Any]], request_of_client: Any, request: Any) -> Any:
    """Wrap `serve_generate_request`: answer clients that accept `MEDIA_TYPE` in columns, with SGLang's own errors."""
    if MEDIA_TYPE not in request.headers.get("accept", "") or request_of_client.stream:
        return await original(request_of_client, request)
    from sglang.srt.entrypoints import http_server
    from starlette.responses import Response

    manager = http_server._global_state.tokenizer_manager
    place, staleness = read_place(request.headers)
    prompts, parameters = request_of_client.input_ids, request_of_client.sampling_params
    read_text = make_text_reader(request.headers, parameters, Path(manager.server_args.model_path), whole=place == "here")
    try:
        answers = await manager.generate_request(request_of_client, request).__anext__()
    except ValueError as error:
        return http_server._create_error_response(error)

    def leave(number: int, answer: Answer) -> Answer:
        return store.leave(prompts[number], answer, place, staleness)

    content = await asyncio.to_thread(pack_answers, answers, read_text, leave)  # other requests go on meanwhile
    return Response(content, media_type=MEDIA_TYPE)
