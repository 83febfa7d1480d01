"""Conversion of messages to tokens with the tokenizer's chat template: a whole conversation, or what follows a response of the policy. What
follows a response is rendered after a placeholder, which is then cut off, so sampled text is never tokenized again."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.rollout.agents.messages import ConversationMessage, RefusedError

_PLACEHOLDER = "(what-the-policy-said)"
_QUESTION = ConversationMessage("user", "?")


class ChatFormat:
    """Chat format of a tokenizer. Texts are tokenized without adding special tokens; ids are int32."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def check(self) -> None:
        """Raise UserError if the tokenizer has no chat template, or a template that drops a response or what follows it."""
        name, fix = self._tokenizer.name_or_path, "correct it, or add chat_template.jinja to that folder"
        if not self._tokenizer.chat_template:
            raise UserError("agent", None, f"needs a chat template, and the tokenizer of {name} has none", fix)
        try:
            kept = all("(more)" in self._render_rest([ConversationMessage(role, "(more)")], "[]") for role in ("user", "tool"))
            kept = kept and _QUESTION.content in self._render([_QUESTION], "[]")
        except RefusedError as error:
            raise UserError("agent", None, f"cannot use the chat template of {name} ({error})", fix) from None
        if not kept:
            raise UserError("agent", None, f"cannot use the chat template of {name}, which leaves out messages", fix)

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    def decode(self, ids: np.ndarray, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)

    def encode_start(self, messages: Sequence[ConversationMessage], tools: str) -> np.ndarray:
        """Return the tokens of a whole conversation up to where the policy begins to respond. Raise RefusedError if the template fails."""
        return self.encode(self._render(messages, tools))

    def encode_rest(self, messages: Sequence[ConversationMessage], tools: str, answer_ids_T: np.ndarray) -> np.ndarray:
        """Return the tokens of the messages that follow a response, up to where the policy begins the next one. They begin with the end
        token of the response if the policy has not sampled it. Raise RefusedError if the template fails."""
        rest = self._render_rest(messages, tools)
        last = self.split_end(answer_ids_T)[1]
        return self.encode(rest.removeprefix(self.decode(last, False)) if len(last) else rest)

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
        chat = [message.to_template() for message in messages]
        try:
            text: str = self._tokenizer.apply_chat_template(
                chat, tools=json.loads(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template can raise anything
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise RefusedError(f"the chat template fails on these messages ({reason[0][:200]})", code="invalid_value") from None
        return text
