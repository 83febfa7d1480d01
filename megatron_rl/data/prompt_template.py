"""Turns a question into a prompt with the prompt template and, if configured, the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.config.data import DataConfig
from megatron_rl.config.reading import read_file
from megatron_rl.errors import UserError
from megatron_rl.hf.special_text import find_special_text
from megatron_rl.types import ChatMessage

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "{question}"


class PromptFormatter(Protocol):
    """Returns the complete prompt for a bare question, the messages before it, and its tools. With `data.special_text = "plain"`, text
    of theirs that looks like a control token is marked (`megatron_rl.hf.special_text`).

    Raises UserError if the chat template fails on the messages or leaves out a tool.
    """

    def __call__(self, question: str, history: Sequence[ChatMessage] = (), tools: Sequence[Mapping[str, Any]] = ()) -> str: ...


def make_prompt_formatter(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptFormatter:
    """Return a formatter whose only special tokens are those of the chat template.

    Raises:
        UserError: The template file is invalid, or `data.chat` is set and the tokenizer has no chat template, or one that fails, leaves out
            the system message or the question, or does not use a key of `data.chat_template_kwargs`.
    """
    template, mark = read_template(data), find_special_text(tokenizer).mark if data.special_text == "plain" else lambda value: value

    def fill_template(question: str, history: Sequence[ChatMessage] = (), tools: Sequence[Mapping[str, Any]] = ()) -> str:
        return template.replace(_PLACEHOLDER, mark(question))  # other braces in the question or template have no meaning

    if not data.chat:
        return fill_template
    from jinja2 import TemplateError

    from megatron_rl.hf.chat_template import ChatTemplate

    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        rule = f"the tokenizer of {name} has no chat template"
        raise UserError("data.chat", None, rule, "set it to false, or add chat_template.jinja to that folder")
    chat_template = ChatTemplate(tokenizer, data)
    chat_template.check()

    def apply_chat_template(question: str, history: Sequence[ChatMessage] = (), tools: Sequence[Mapping[str, Any]] = ()) -> str:
        history, tools = [message if message["role"] == "assistant" else mark(message) for message in history], mark(tools)
        if data.system_prompt:
            own = {"role": "system", "content": data.system_prompt}
            history = [own, *history[bool(history) and history[0]["role"] == "system" :]]
        messages = [*history, {"role": "user", "content": fill_template(question)}]
        try:
            prompt = chat_template.render(messages, tools)
        except TemplateError as error:
            reason, roles = str(error).strip().splitlines()[0][:200], ", ".join(message["role"] for message in messages)
            rule = f"the chat template of {name} fails on messages of {roles} ({reason})"
            raise UserError("data.chat", None, rule, "remove data.system_prompt, or the rows with messages of other roles") from None
        called = [call for message in history for call in message.get("tool_calls", ())]
        for tool in dict.fromkeys(part["function"]["name"] for part in (*tools, *called)):
            if tool not in prompt:
                rule = f"the chat template of {name} leaves out the tool {tool!r}"
                raise UserError("data.chat", None, rule, "use a tokenizer whose template supports tools, or remove data.columns.tools")
        return prompt

    question = "What is 1 + 1?"
    prompt = apply_chat_template(question)
    if question not in prompt:
        raise UserError("data.chat", None, f"the chat template of {name} leaves out the question", "correct the template")
    if data.system_prompt.strip() not in prompt:
        raise UserError(
            "data.system_prompt", None, f"the chat template of {name} leaves it out", "put it into data.prompt_template instead"
        )
    return apply_chat_template


def describe_format(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    """Return everything apart from a row that decides the text of its prompt: plain values, none of which depends on the clock."""
    chat = (
        (tokenizer.chat_template, data.system_prompt, sorted(data.chat_template_kwargs.items()), data.date.isoformat()) if data.chat else ()
    )
    return read_template(data), *chat


def list_oddities(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return what a user may not expect of the prompts."""
    from megatron_rl.hf.chat_template import ChatTemplate

    oddities = []
    if data.prompt_template_file and read_template(data).endswith("\n"):
        oddities.append(f"{data.prompt_template_file} ends with a line break, which is part of every prompt")
    if data.chat and not ChatTemplate(tokenizer, data).has_generation_prompt():
        oddities.append(f"the chat template of {tokenizer.name_or_path} has no generation prompt, so prompts end with the user's message")
    return oddities


def read_template(data: DataConfig) -> str:
    """Return the text around each question. Raise UserError if the file cannot be read or does not contain `{question}`."""
    file = data.prompt_template_file
    if file is None:
        return data.prompt_template
    field = "data.prompt_template_file"
    try:
        text = read_file(file).decode("utf-8-sig")  # some editors mark UTF-8 by a first character
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(field, str(file), f"cannot be read ({reason})", f"use a text file that contains {_PLACEHOLDER}") from None
    if _PLACEHOLDER not in text:
        raise UserError(field, str(file), f"does not contain {_PLACEHOLDER}", "put it where the question belongs")
    return text
