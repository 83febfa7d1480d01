"""Conversion of messages to tokens with the tokenizer's chat template: a whole conversation, or what follows a response of the policy. What
follows a response is rendered after a placeholder, which is then cut off, so sampled text is never tokenized again."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.chat_template import ChatTemplate
from megatron_rl.hf.prompt_tokens import check_prompt, encode_continuation, encode_prompt
from megatron_rl.rewards.thinking import decode_completion, find_markers
from megatron_rl.rollout.agents.messages import TEXT, ConversationMessage, RefusedError

_PLACEHOLDER = "(what-the-policy-said)"
_QUESTION = ConversationMessage("user", "?")


class ChatFormat:
    """Chat format of a tokenizer. Texts are tokenized without adding special tokens; ids are int32."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        """`data`: `chat_template_kwargs` and `date`."""
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer, data)

    def check(self) -> None:
        """Raise UserError if the tokenizer has no chat template, or a template that drops a response or what follows it."""
        name, fix = self._tokenizer.name_or_path, "correct it, or add chat_template.jinja to that folder"
        if not self._tokenizer.chat_template:
            raise UserError("agent", None, f"needs a chat template, and the tokenizer of {name} has none", fix)
        self._template.check()
        try:
            kept = all("(more)" in self._render_rest([ConversationMessage(role, "(more)")], "[]") for role in ("user", "tool"))
            start = self._render([_QUESTION], "[]")
            kept = kept and _QUESTION.content in start
        except RefusedError as error:
            raise UserError("agent", None, f"cannot use the chat template of {name} ({error})", fix) from None
        if not kept:
            raise UserError("agent", None, f"cannot use the chat template of {name}, which leaves out messages", fix)
        check_prompt(self._tokenizer, start, self.encode(start).tolist(), chat=True)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: np.ndarray, stop: Sequence[str] = ()) -> str:
        """See `decode_completion`."""
        return decode_completion(self._tokenizer, ids.tolist(), stop=stop)

    def decode_all(self, ids: np.ndarray) -> str:
        """Return the text with all special tokens."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def opened_thought(self, prompt_ids_T: np.ndarray) -> str:
        """Return the marker of a thought that the template has opened at the end of a prompt, or ""."""
        start, _ = find_markers(self._tokenizer.chat_template)
        return start if self.decode(prompt_ids_T[-64:]).rstrip().endswith(start) else ""

    def encode_start(self, messages: Sequence[ConversationMessage], tools: str) -> np.ndarray:
        """Return the tokens of a whole conversation up to where the policy begins to respond. Raise RefusedError if the template fails."""
        if messages[0].role == TEXT:
            with _refusing("the tokenizer"):
                ids = encode_prompt(self._tokenizer, messages[0].content, chat=False)
            if not ids:
                raise RefusedError("prompt: must have at least one token", code="invalid_value")
            return np.array(ids, np.int32)
        text = self._render(messages, tools)
        with _refusing("the tokenizer"):
            return self.encode(text)

    def encode_rest(self, messages: Sequence[ConversationMessage], tools: str, answer_ids_T: np.ndarray) -> np.ndarray:
        """Return the tokens of the messages that follow a response, up to where the policy begins the next one. They begin with the end
        token of the response if the policy has not sampled it. Raise RefusedError if the template fails."""
        last = self.split_end(answer_ids_T)[1]
        rest = messages[0].content if messages[0].role == TEXT else self._render_rest(messages, tools)
        rest = rest.removeprefix(self.decode_all(last)) if len(last) else rest
        with _refusing("the tokenizer"):
            return np.array(encode_continuation(self._tokenizer, rest, int(last[0]) if len(last) else None), np.int32)

    def writes_same(self, messages: Sequence[ConversationMessage], others: Sequence[ConversationMessage], tools: str, first: bool) -> bool:
        """Return whether the chat template writes the same text for both. Some templates write neither names nor blanks. `first`: whether
        the messages begin a conversation instead of following a response."""
        render = self._render if first else self._render_rest
        try:
            return messages[0].role != TEXT and render(messages, tools) == render(others, tools)
        except RefusedError:
            return False

    def split_end(self, answer_ids_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a response's tokens without its end token, and the end token if there is one."""
        count = len(answer_ids_T) - bool(len(answer_ids_T) and int(answer_ids_T[-1]) in self._tokenizer.all_special_ids)
        return answer_ids_T[:count], answer_ids_T[count:]

    def _render_rest(self, messages: Sequence[ConversationMessage], tools: str) -> str:
        whole = self._render([_QUESTION, ConversationMessage("assistant", _PLACEHOLDER), *messages], tools)
        _, found, rest = whole.partition(_PLACEHOLDER)
        if not found:
            raise RefusedError("the chat template drops what the assistant said", code="invalid_value")
        return rest

    def _render(self, messages: Sequence[ConversationMessage], tools: str) -> str:
        with _refusing("the chat template"):
            return self._template.render([message.to_template() for message in messages], json.loads(tools) or ())


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise RefusedError instead of anything that a template or a tokenizer raises about an agent's messages."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RefusedError(f"{what} fails on these messages ({reason[0][:200]})", code="invalid_value") from None
