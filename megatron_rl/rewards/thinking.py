"""Separates the thought of a reasoning model from its answer.

Only what follows the thought is judged. A model that learned otherwise would earn its reward inside the thought and never stop thinking.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

ThoughtMarkers = tuple[str, str]
"""Texts that begin and end a thought."""
DEFAULT_MARKERS: ThoughtMarkers = ("<think>", "</think>")
_END_IN_TEMPLATE = re.compile(r"(<|\[)/((?:\w+:)?\w*(?:think|thought|reason)\w*)(>|\])", re.IGNORECASE)


class Response(NamedTuple):
    """A completion without its thought, and the thought. `answer` is None if the thought is unfinished, so that there is no answer yet."""

    answer: str | None
    thought: str


def find_markers(chat_template: str | Mapping[str, str] | None) -> ThoughtMarkers:
    """Return the markers that a chat template handles, such as `[THINK]` and `[/THINK]`, or one of several templates by name. Return
    `DEFAULT_MARKERS` if it handles none."""
    templates = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""]
    match = _END_IN_TEMPLATE.search("\n".join(templates))
    return (f"{match[1]}{match[2]}{match[3]}", match[0]) if match else DEFAULT_MARKERS


def split_thought(text: str, prompt: str = "", markers: ThoughtMarkers | None = DEFAULT_MARKERS) -> Response:
    """Separate the thoughts of a completion from its answer.

    Text before an end marker without a start marker is a thought too, because some chat templates begin the thought in the prompt.

    Args:
        text: The completion.
        prompt: The prompt with the template applied. If it ends with the start marker, the completion begins inside a thought.
        markers: None if the model does not think; the whole text is its answer then.
    """
    if markers is None:
        return Response(text, "")
    start, end = markers
    thinking = prompt.rstrip().endswith(start)
    answers, thoughts, position = list[str](), list[str](), 0
    for match in re.finditer(f"({re.escape(end)})|{re.escape(start)}", text):
        part, position = text[position : match.start()], match.end()
        if match[1] and not thinking:  # the start marker is missing, so everything before is a thought
            thoughts += [*answers, part]
            answers.clear()
        else:
            (thoughts if thinking else answers).append(part)
        thinking = not match[1]
    (thoughts if thinking else answers).append(text[position:])
    return Response(None if thinking else "".join(answers), "".join(thoughts))


def decode_completion(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of token ids without special tokens. Markers of thoughts are kept, even if they are special tokens."""
    markers = {tokenizer.convert_tokens_to_ids(marker): marker for marker in find_markers(getattr(tokenizer, "chat_template", None))}
    kept = markers.keys() & set(getattr(tokenizer, "all_special_ids", ()))
    if kept.isdisjoint(ids):
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text
    runs = [(marked, [*run]) for marked, run in groupby(ids, kept.__contains__)]
    return "".join(
        "".join(map(markers.__getitem__, run)) if marked else tokenizer.decode(run, skip_special_tokens=True) for marked, run in runs
    )
