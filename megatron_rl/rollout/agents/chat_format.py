"""Conversion of messages to tokens with the tokenizer's chat template: a whole conversation, or what follows a response of the policy. What
follows a response is rendered after a placeholder, which is then cut off, so sampled text is never tokenized again."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.chat_template import ChatTemplate
from megatron_rl.hf.prompt_tokens import check_prompt, encode_continuation, encode_prompt
from megatron_rl.hf.special_text import find_special_text
from megatron_rl.hf.vocabulary import find_end_tokens
from megatron_rl.rewards.thinking import decode_completion, find_markers
from megatron_rl.rollout.agents.messages import TEXT, ConversationMessage, RefusedError, ToolCall

_log = logging.getLogger(__name__)
_PLACEHOLDER = "(what-the-policy-said)"
_QUESTION = ConversationMessage("user", "(what-the-user-asked)")


class ChatFormat:
    """Chat format of a tokenizer. Texts are tokenized without adding special tokens; ids are int32."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        """`data`: `chat_template_kwargs`, `date`, and `special_text`."""
        self._tokenizer, self._template, self._treatment = tokenizer, ChatTemplate(tokenizer, data), data.special_text
        self._has_warned = False  # about tools that the template leaves out
        self._special, self._ends = find_special_text(tokenizer), find_end_tokens(tokenizer)

    def check(self, tools: bool) -> None:
        """Raise UserError if the tokenizer has no chat template, or a template that drops a response or what follows it. `tools`: whether
        tools may be called, so that the template must write their messages."""
        name, fix = self._tokenizer.name_or_path, "correct it, or add chat_template.jinja to that folder"
        if not self._tokenizer.chat_template:
            raise UserError("agent", None, f"needs a chat template, and the tokenizer of {name} has none", fix)
        self._template.check()
        try:
            start = self._render([_QUESTION], "[]")
            kept = _QUESTION.content in start and self._keeps("user") and (not tools or self._keeps_results)
        except RefusedError as error:
            raise UserError("agent", None, f"cannot use the chat template of {name} ({error})", fix) from None
        if not kept:
            raise UserError("agent", None, f"cannot use the chat template of {name}, which leaves out messages", fix)
        check_prompt(self._tokenizer, start, self.encode(start).tolist(), chat=True)

    def _keeps(self, role: str) -> bool:
        """Return whether the template writes a message of this role behind a response. Raise RefusedError if it fails."""
        return "(more)" in self._render_rest([ConversationMessage(role, "(more)", tool_call_id="call00000")], "[]")

    @cached_property
    def _keeps_results(self) -> bool:
        return self._keeps("tool")

    def _check_results(self, messages: Sequence[ConversationMessage]) -> None:
        if any(message.role == "tool" for message in messages) and not self._keeps_results:
            raise RefusedError("messages: the chat template leaves out results of tools")

    def encode(self, text: str) -> np.ndarray:
        return np.array(encode_prompt(self._tokenizer, text, chat=True), np.int32)

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

    def mark_thought(self, thought: str, content: str, prompt_ids_T: np.ndarray, answer_ids_T: np.ndarray) -> str:
        """Return thought and text of a response as one text with the template's markers."""
        start, end = find_markers(self._tokenizer.chat_template)
        if not thought:
            return self.opened_thought(prompt_ids_T) + content
        return start + thought + (end if end in self.decode(answer_ids_T) else "") + content

    def encode_start(self, messages: Sequence[ConversationMessage], tools: str) -> np.ndarray:
        """Return the tokens of a whole conversation up to where the policy begins to respond. Raise RefusedError if the template fails."""
        if messages[0].role == TEXT:
            with _refusing("the tokenizer"):
                ids = encode_prompt(self._tokenizer, messages[0].content, chat=False)
            if not ids:
                raise RefusedError("prompt: must have at least one token", code="invalid_value")
            return np.array(ids, np.int32)
        self._check_results(messages)
        text = self._render(messages, tools)
        if not self._has_warned:
            left_out = [name for tool in self._treat(json.loads(tools)) if (name := tool["function"]["name"]) not in text]
            if left_out:
                self._has_warned = True
                _log.warning("the chat template leaves out the tool %r, so the policy does not know it from there", left_out[0])
        with _refusing("the tokenizer"):
            return self.encode(text)

    def encode_rest(
        self, messages: Sequence[ConversationMessage], tools: str, answer_ids_T: np.ndarray, calls: Sequence[ToolCall] = ()
    ) -> np.ndarray:
        """Return the tokens of the messages that follow a response, up to where the policy begins the next one. They begin with the end
        token of the response if the policy has sampled none. `calls`: tool calls of the response. Raise RefusedError if the template
        fails."""
        self._check_results(messages)
        last = self.split_end(answer_ids_T)[1]
        rest = messages[0].content if messages[0].role == TEXT else self._render_rest(messages, tools, calls)
        if len(last):  # a template may end turns with another end token than the sampled one
            end = self.decode_all(last)
            rest = rest.removeprefix(end if rest.startswith(end) or messages[0].role == TEXT else self._turn_end)
        with _refusing("the tokenizer"):
            return np.array(encode_continuation(self._tokenizer, rest, int(last[0]) if len(last) else None), np.int32)

    def encode_reply(self, text: str, role: str, answer_ids_T: np.ndarray) -> np.ndarray:
        """Return the tokens of an environment's message that follows a response: its text alone, or with `role`, what the chat template
        writes. Raise RefusedError if the template fails, or for special text with `data.special_text = "refuse"`."""
        if role:
            return self.encode_rest([ConversationMessage(role, text)], "[]", answer_ids_T)
        last = int(answer_ids_T[-1]) if len(answer_ids_T) else None
        return np.array(encode_continuation(self._tokenizer, self._treat(text), last), np.int32)

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
        count = len(answer_ids_T) - bool(len(answer_ids_T) and int(answer_ids_T[-1]) in self._ends)
        return answer_ids_T[:count], answer_ids_T[count:]

    def _render_rest(self, messages: Sequence[ConversationMessage], tools: str, calls: Sequence[ToolCall] = ()) -> str:
        try:
            whole = self._render([_QUESTION, ConversationMessage("assistant", _PLACEHOLDER), *messages], tools)
        except RefusedError:
            if messages[0].role != "tool":
                raise
            return self._render_results(messages, tools, calls or [ToolCall(messages[0].tool_call_id, "function", "{}")])
        _, found, rest = whole.partition(_PLACEHOLDER)
        if not found:
            raise RefusedError("the chat template drops what the assistant said", code="invalid_value")
        return rest

    def _render_results(self, messages: Sequence[ConversationMessage], tools: str, calls: Sequence[ToolCall]) -> str:
        """Return what follows a response with tool calls, for a template that refuses a tool's message without a call before it. The
        placeholder is the last call's argument, and the text begins with the first token after it that can end a turn."""
        call = replace(calls[-1], arguments=json.dumps({"text": _PLACEHOLDER}))
        rest = self._render([_QUESTION, ConversationMessage("assistant", "", (*calls[:-1], call)), *messages], tools)
        rest = rest.partition(_PLACEHOLDER)[2]
        ends = {self._turn_end, *(self.decode_all(np.array([number])) for number in self._ends)} - {""}
        starts = [at for end in ends if (at := rest.find(end)) >= 0]
        if not starts:
            raise RefusedError("the chat template drops the assistant's tool calls", code="invalid_value")
        return rest[min(starts) :]

    @cached_property
    def _turn_end(self) -> str:
        """The control token that ends messages of all roles, or "" if there is none. It follows the user's message, too."""
        rest = self._render([_QUESTION, ConversationMessage("assistant", _PLACEHOLDER), _QUESTION], "[]")
        after_user, after_assistant = (rest.partition(text)[2] for text in (_QUESTION.content, _PLACEHOLDER))
        end = self._special.find_first(after_user)
        return end if after_assistant.startswith(end) else ""

    def _treat(self, value: Any) -> Any:
        """Return a value of JSON with its special text as `data.special_text` says, or raise RefusedError."""
        if self._treatment == "refuse" and (found := self._special.find(value)):
            rule = f'a message holds {found!r}, which looks like a control token (data.special_text = "refuse")'
            raise RefusedError(rule, code="invalid_value")
        return self._special.mark(value) if self._treatment == "plain" else value

    def _render(self, messages: Sequence[ConversationMessage], tools: str) -> str:
        treated = [each.to_template() if each.role == "assistant" else self._treat(each.to_template()) for each in messages]
        functions = self._treat(json.loads(tools))
        with _refusing("the chat template"):
            return self._template.render(treated, functions or ())


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise RefusedError instead of anything that a template or a tokenizer raises about an agent's messages."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RefusedError(f"{what} fails on these messages ({reason[0][:200]})", code="invalid_value") from None
