"""From a question to the prompt: the template around it, then the tokenizer's chat template where configured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

_PLACEHOLDER = "{question}"


class PromptFormatter(Protocol):
    """Makes the whole prompt of a bare question. `history`: (role, content) of the messages before it. Raises UserError where the chat
    template refuses them."""

    def __call__(self, question: str, history: Sequence[tuple[str, str]] = ()) -> str: ...


def make_prompt_formatter(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptFormatter:
    """Return what makes a prompt, without special tokens other than those the chat template writes.

    Raise UserError for a template file that cannot be read or holds no `{question}`; where `data.chat` is on also for a tokenizer
    without chat template, and for one that refuses or drops the system's message or the question.
    """
    template = read_template(data)

    def fill_template(question: str, history: Sequence[tuple[str, str]] = ()) -> str:
        """Replace plainly: other braces in question or template mean nothing."""
        return template.replace(_PLACEHOLDER, question)

    if not data.chat:
        return fill_template
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        rule = f"the tokenizer of {tokenizer.name_or_path} has no chat template"
        raise UserError("data.chat", None, rule, "set it to false, or add chat_template.jinja to that folder")

    def apply_chat_template(question: str, history: Sequence[tuple[str, str]] = ()) -> str:
        if data.system_prompt:
            history = [("system", data.system_prompt), *history[bool(history) and history[0][0] == "system" :]]
        chat = [*history, ("user", fill_template(question))]
        messages = [{"role": role, "content": content} for role, content in chat]
        try:
            prompt: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:  # a template is a program
            reason, roles = str(error).strip().splitlines()[0][:200], ", ".join(role for role, _ in chat)
            rule = f"the chat template of {tokenizer.name_or_path} fails on messages of {roles} ({reason})"
            raise UserError("data.chat", None, rule, "leave out data.system_prompt, or the rows with messages of other roles") from None
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
