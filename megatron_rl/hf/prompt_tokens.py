"""Token ids of complete prompts, the same in policy, trainer, held-out sets and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from megatron_rl.errors import UserError
from megatron_rl.hf.special_text import MARK, find_special_text

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool) -> list[int]:
    """Return the token ids of a complete prompt.

    With `chat`, a chat template has written all special tokens. Otherwise the tokenizer adds its own, such as the BOS token of Llama, Gemma
    and DeepSeek, as `tokenizer(prompt)` does. Marked text is text, whatever it looks like (`megatron_rl.hf.special_text`).
    """
    if MARK in prompt:
        return find_special_text(tokenizer).encode(prompt, add_special_tokens=not chat)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=not chat)
    return ids


_ANCHORS = ("\n", ".", "a", "0")


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str, before: int | None = None) -> list[int]:
    """Return the token ids of a text that follows other tokens, such as an environment's message, without special tokens.

    Tokenizers of SentencePiece's kind put a blank before a text. It would stand between the policy's tokens and this text, so the text is
    encoded behind an anchor whose tokens are then cut off.

    Args:
        before: The last of the other tokens. Some tokenizers put a blank behind an added token, such as the end token, which is then the
            anchor.
    """
    ids = encode_prompt(tokenizer, text, chat=True)
    added = _list_added_tokens(tokenizer).get(before) if text and before is not None else None
    if added is not None and (found := _encode_behind(tokenizer, added, text)) is not None:
        return found
    if not text or not _changes_beginnings(tokenizer):
        return ids
    behind = (_encode_behind(tokenizer, anchor, text) for anchor in _ANCHORS)
    return next((found for found in behind if found is not None), ids)


@lru_cache(maxsize=16)
def _list_added_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return the texts of added tokens. Cached, because transformers builds this table anew at each access."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}


@lru_cache(maxsize=16)
def _changes_beginnings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a text has other tokens at the beginning than behind other text."""
    return _encode_behind(tokenizer, "\n", "a") != tokenizer.encode("a", add_special_tokens=False)


def _encode_behind(tokenizer: PreTrainedTokenizerBase, anchor: str, text: str) -> list[int] | None:
    """Return the ids of a text behind an anchor, or None if a token spans both."""
    before: list[int] = tokenizer.encode(anchor, add_special_tokens=False)
    whole = encode_prompt(tokenizer, anchor + text, chat=True)
    return whole[len(before) :] if whole[: len(before)] == before else None


def check_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, ids: Sequence[int], chat: bool) -> None:
    """Raise UserError if a prompt begins twice with special tokens such as BOS, or if the tokenizer has added its end token."""
    for size in (1, 2):  # GLM's prompts begin with two tokens, [gMASK] and <sop>
        begin = [*ids[:size]]
        if begin == [*ids[size : 2 * size]] and (text := _decode_special(tokenizer, begin)):
            writers = "the chat template writes it twice" if chat else "the prompt's text begins with it, and the tokenizer adds another"
            rule = f"a prompt begins with two BOS tokens {text!r}, because {writers}: {prompt[:60]!r}"
            fix = "remove it from the text, or set data.chat = true if rows are messages"
            raise UserError("data.chat", chat, rule, "correct the template or data.system_prompt" if chat else fix)
    if chat or not len(ids):
        return
    eos, is_lone_bos = tokenizer.eos_token_id, len(ids) == 1 and ids[0] == tokenizer.bos_token_id
    if ids[-1] == eos and not is_lone_bos and not prompt.endswith(str(tokenizer.eos_token)):
        rule = f"the tokenizer of {tokenizer.name_or_path} ends every prompt with its end token {tokenizer.eos_token!r}"
        raise UserError("model.path", None, rule, "correct the post_processor in tokenizer.json")


def _decode_special(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of special tokens, or "" if there are others among them."""
    return "" if tokenizer.decode(ids, skip_special_tokens=True) else str(tokenizer.decode(ids, skip_special_tokens=False))
