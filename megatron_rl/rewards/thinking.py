"""Separates the thought of a reasoning model from its answer.

Only what follows the thought is judged. A model that learned otherwise would earn its reward inside the thought and never stop thinking.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

ThoughtMarkers = tuple[str, str]
"""Texts that begin and end a thought."""
DEFAULT_MARKERS: ThoughtMarkers = ("<think>", "</think>")
_CHANNELS: ThoughtMarkers = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")  # gpt-oss
_CHANNEL = r"(?:<\|start\|>)?(?:assistant(?: to=\S+?)?)?<\|channel\|>{}[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
_OTHER_MARKERS: tuple[ThoughtMarkers, ...] = (
    _CHANNELS,
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("◁think▷", "◁/think▷"),  # Kimi-VL
)
_END_IN_TEMPLATE = re.compile(r"(<|\[)/((?:\w+:)?\w*(?:think|thought|reason)\w*)(>|\])", re.IGNORECASE)


class Response(NamedTuple):
    """A completion without its thought, and the thought. `answer` is None if the thought is unfinished, so that there is no answer yet."""

    answer: str | None
    thought: str

    def compute_thought_share(self, text: str) -> float:
        """Return the share of the completion's characters that are in its thought. `text`: the whole completion."""
        return len(self.thought) / max(len(text), 1)


def find_markers(chat_template: str | Mapping[str, str] | None) -> ThoughtMarkers:
    """Return the markers that a chat template handles, such as `[THINK]` and `[/THINK]`. Return `DEFAULT_MARKERS` if it handles none."""
    template = "\n".join(chat_template.values()) if isinstance(chat_template, Mapping) else chat_template or ""
    for markers in _OTHER_MARKERS:
        if all(marker in template for marker in markers):
            return markers
    match = _END_IN_TEMPLATE.search(template)
    return (f"{match[1]}{match[2]}{match[3]}", match[0]) if match else DEFAULT_MARKERS


def split_thought(text: str, prompt: str = "", markers: ThoughtMarkers | None = DEFAULT_MARKERS) -> Response:
    """Separate the thoughts of a completion from its answer.

    Text before an end marker without a start marker is a thought too, because some chat templates begin the thought in the prompt. Of
    gpt-oss, all that is not in the channel "final" is thought.

    Args:
        text: The completion.
        prompt: The prompt with the template applied. If it ends with the start marker, the completion begins inside a thought.
        markers: None if the model does not think; the whole text is its answer then.
    """
    if markers is None:
        return Response(text, "")
    start, end = map(re.escape, markers)
    thinking = prompt.rstrip().endswith(markers[0])
    if markers == _CHANNELS:
        start, end, text = _CHANNEL.format(r"(?!final\b)"), _CHANNEL.format(r"final\b"), re.sub(r"<\|(?:call|end|return)\|>", "", text)
        thinking = not re.search(rf"{end}\s*$", prompt)
    answers, thoughts, position = list[str](), list[str](), 0
    for match in re.finditer(f"({end})|{start}", text):
        part, position = text[position : match.start()], match.end()
        if match[1] and not thinking:  # the start marker is missing, so everything before is a thought
            thoughts += [*answers, part]
            answers.clear()
        else:
            (thoughts if thinking else answers).append(part)
        thinking = not match[1]
    (thoughts if thinking else answers).append(text[position:])
    return Response(None if thinking else "".join(answers), "".join(thoughts))


def decode_completion(tokenizer: Any, ids: Sequence[int], markers: ThoughtMarkers | None = None, stop: Sequence[str] = ()) -> str:
    """Return the text of token ids that follow other tokens, without special tokens, except those that mark thoughts or are in stop texts.
    `markers`: None for the chat template's own."""
    names = "\n".join((*(markers or find_markers(getattr(tokenizer, "chat_template", None))), *stop))
    kept = {number: token for number, token in _list_special_tokens(tokenizer).items() if token in names}
    runs = [(is_kept, [*run]) for is_kept, run in groupby(ids, kept.__contains__)]
    return "".join("".join(map(kept.__getitem__, run)) if is_kept else _decode_behind(tokenizer, run) for is_kept, run in runs)


@lru_cache(maxsize=16)
def _list_special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens that decoding can skip."""
    return {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _decode_behind(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of token ids without special tokens, decoded behind a digit that is then cut off: tokenizers of SentencePiece's kind
    drop a blank at the beginning."""
    text: str = tokenizer.decode([*tokenizer.encode("0", add_special_tokens=False)[-1:], *ids], skip_special_tokens=True)
    return text[1:] if text.startswith("0") else tokenizer.decode(ids, skip_special_tokens=True)
