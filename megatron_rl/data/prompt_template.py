"""From a question to the prompt: the template around it, then the tokenizer's chat template where configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.types import ChatMessage

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "{question}"


class PromptFormatter(Protocol):
    """Makes the whole prompt of a bare question. `history`: the messages before it. Raises UserError where the chat template refuses
    them, or leaves out a tool."""

    def __call__(self, question: str, history: Sequence[ChatMessage] = (), tools: Sequence[Mapping[str, Any]] = ()) -> str: ...


def make_prompt_formatter(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptFormatter:
    """Return what makes a prompt, without special tokens other than those the chat template writes.

    Raise UserError for a template file that cannot be read or holds no `{question}`; where `data.chat` is on also for a tokenizer
    without chat template, and for one that refuses or drops the system's message or the question.
    """
    template = read_template(data)

    def fill_template(question: str, history: Sequence[ChatMessage] = (), tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Replace plainly: other braces in question or template mean nothing."""
        return template.replace(_PLACEHOLDER, question)

    if not data.chat:
        return fill_template
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        rule = f"the tokenizer of {tokenizer.name_or_path} has no chat template"
        raise UserError("data.chat", None, rule, "set it to false, or add chat_template.jinja to that folder")

    def apply_chat_template(question: str, history: Sequence[ChatMessage] = (), tools: Sequence[Mapping[str, Any]] = ()) -> str:
        if data.system_prompt:
            own = {"role": "system", "content": data.system_prompt}
            history = [own, *history[bool(history) and history[0]["role"] == "system" :]]
        messages = [*map(dict, history), {"role": "user", "content": fill_template(question)}]
        try:
            prompt: str = tokenizer.apply_chat_template(
                messages, tools=[*map(dict, tools)] or None, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:  # a template is a program
            reason, roles = str(error).strip().splitlines()[0][:200], ", ".join(message["role"] for message in messages)
            rule = f"the chat template of {tokenizer.name_or_path} fails on messages of {roles} ({reason})"
            raise UserError("data.chat", None, rule, "leave out data.system_prompt, or the rows with messages of other roles") from None
        called = [call for message in history for call in message.get("tool_calls", ())]
        for name in dict.fromkeys(part["function"]["name"] for part in (*tools, *called)):
            if name not in prompt:
                rule = f"the chat template of {tokenizer.name_or_path} leaves out the tool {name!r}"
                raise UserError("data.chat", None, rule, "use a tokenizer whose template knows tools, or leave out data.columns.tools")
        return prompt

    _check_chat(apply_chat_template, data, tokenizer.name_or_path)
    return apply_chat_template


def read_template(data: DataConfig) -> str:
    """Return the text around each question. Raise UserError for a file that cannot be read or holds no `{question}`."""
    file = data.prompt_template_file
    if file is None:
        return data.prompt_template
    field = "data.prompt_template_file"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(field, str(file), f"cannot be read ({reason})", f"give a text file that holds {_PLACEHOLDER}") from None
    if _PLACEHOLDER not in text:
        raise UserError(field, str(file), f"holds no {_PLACEHOLDER}", "put it where the question belongs")
    return text


def _check_chat(format_prompt: PromptFormatter, data: DataConfig, folder: str) -> None:
    """Raise UserError for a chat template that fails, or drops the question or the system's message."""
    question = "What is 1 + 1?"
    prompt = format_prompt(question)
    if question not in prompt:
        raise UserError("data.chat", None, f"the chat template of {folder} leaves out the question", "correct the template")
    if data.system_prompt.strip() not in prompt:
        rule = f"the chat template of {folder} leaves it out"
        raise UserError("data.system_prompt", None, rule, "put it into data.prompt_template instead")
