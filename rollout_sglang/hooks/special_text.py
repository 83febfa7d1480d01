"""Chat completions of a served model: text in messages that looks like a control token is text, as in training (`data.special_text`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_rl.hf.prompt_tokens import encode_prompt
from megatron_rl.hf.special_text import MARK, find_special_text

TREATMENT_VARIABLE = "MEGATRON_RL_SPECIAL_TEXT"


def render(original: Callable[..., Any], serving: Any, messages: Sequence[Mapping[str, Any]], *, tools: Any, **options: Any) -> Any:
    """Wrap `_render_and_encode_chat_template`. Templates that are code or have no text encode messages as text by themselves."""
    tokenizer, treatment = serving.tokenizer_manager.tokenizer, os.environ.get(TREATMENT_VARIABLE, "plain")
    if treatment != "token" and not serving._prompt_text_round_trip_is_lossy and serving.template_manager.python_chat_template is None:
        special = find_special_text(tokenizer)
        others = [message for message in messages if message.get("role") != "assistant"]
        if treatment == "refuse" and (found := special.find([others, tools])):
            raise ValueError(f'a message holds {found!r}, which looks like a control token (data.special_text = "refuse")')
        messages = [message if message.get("role") == "assistant" else special.mark(message) for message in messages]
        tools = special.mark(tools)
    return original(serving, messages, tools=tools, **options)


def encode(original: Callable[..., list[int]], tokenizer: Any, text: str, options: Mapping[str, Any] | None = None) -> list[int]:
    """Wrap `parallel_prompt_encode`."""
    if MARK not in text:
        return original(tokenizer, text, options)
    return encode_prompt(tokenizer, text, chat=not (options or {}).get("add_special_tokens", True))
