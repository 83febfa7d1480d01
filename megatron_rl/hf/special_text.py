"""Text in messages that looks like control tokens, such as `<|im_end|>` in a web page that a tool returns. It is text, not a control token,
unless `data.special_text` says otherwise, so no message can forge a turn.

A chat template mixes its own control tokens with the messages. So, before rendering, `SpecialText.mark` writes a mark, which no message can
guess, into each such text of a message. Templates then write the text like any other. `encode` removes the marks again: a copy of the
tokenizer, whose control tokens have other names, reads marked text as text and everything else as before.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

MARK = f"\ufdd0{secrets.token_hex(8)}\ufdd0"


class SpecialText:
    """Finds, marks, and encodes control tokens: the special tokens of a tokenizer, and the added tokens that its chat template writes."""

    def __init__(self, tokenizer: Any) -> None:
        template = getattr(tokenizer, "chat_template", None) or ""
        template = "\n".join(template.values()) if isinstance(template, Mapping) else template
        self._tokenizer = tokenizer
        self._names = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if len(token.content.strip()) > 1 and (token.special or (token.content in template and not token.content.isalnum()))
        }
        longest_first = sorted(map(re.escape, self._names.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first) if longest_first else "(?!)")
        self._starts = re.compile(f"(?={self._pattern.pattern}).", re.DOTALL)  # tokens may overlap, as MiniMax's ]~b] and ]~!b[
        heads = {name[:cut] for name in self._names.values() for cut in range(1, len(name) + 1)}
        cuts = {(name[:cut], name[cut:]) for name in self._names.values() for cut in range(1, len(name))}
        self._edges = tuple({head for head, tail in cuts if tail in heads})

    def find(self, value: Any) -> str:
        """Return the first text in a value of JSON that looks like a control token, or ""."""
        if isinstance(value, str):
            match = self._pattern.search(value)
            return match[0] if match else ""
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, Sequence) else ()
        return next(filter(None, map(self.find, items)), "")

    def find_first(self, text: str) -> str:
        """Return the control token that a text begins with, or ""."""
        match = self._pattern.match(text)
        return match[0] if match else ""

    def mark(self, value: Any) -> Any:
        """Return a value of JSON in which each text that looks like a control token has a mark behind its first character, and each text
        that would become one with the template's next token has a mark behind it."""
        if isinstance(value, str):
            marked = self._starts.sub(lambda match: match[0] + MARK, value) if self._pattern.search(value) else value
            return marked + MARK if value.endswith(self._edges) else marked
        if isinstance(value, Mapping):
            return {key: self.mark(item) for key, item in value.items()}
        return [*map(self.mark, value)] if isinstance(value, list | tuple) else value

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text with marks."""
        renamed = self._pattern.sub(lambda match: MARK + match[0], text)
        plain = re.sub(f"{MARK}(?!{self._pattern.pattern})", "", renamed)
        ids: list[int] = self._copy.encode(plain, add_special_tokens=add_special_tokens).ids
        return ids

    @cached_property
    def _copy(self) -> Any:
        """A copy of the tokenizer in which the name of each control token begins with the mark."""
        from tokenizers import Tokenizer

        whole = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in whole["added_tokens"]:
            if token["id"] in self._names:
                token["content"] = MARK + token["content"]
        model, names = whole["model"], {name: MARK + name for name in self._names.values()}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(name, name): number for name, number in model["vocab"].items()}
        else:  # Unigram: pairs of a name and a score
            model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        copy = Tokenizer.from_str(json.dumps(whole))
        for number, name in self._names.items():
            assert copy.token_to_id(MARK + name) == number, f"{name!r} has another id in a copy of the tokenizer"
        return copy


@lru_cache(maxsize=16)
def find_special_text(tokenizer: Any) -> SpecialText:
    """Return the `SpecialText` of a tokenizer, which is made once."""
    return SpecialText(tokenizer)


def split_marks(text: str) -> tuple[str, tuple[int, ...]]:
    """Return a text without its marks, and their positions in what is returned."""
    parts = text.split(MARK)
    return "".join(parts), tuple(accumulate(map(len, parts[:-1])))


def put_marks(text: str, positions: Sequence[int]) -> str:
    """Invert `split_marks`."""
    cuts = (0, *positions, len(text))
    return MARK.join(text[start:end] for start, end in pairwise(cuts))
