"""The tokenizer's chat template with everything it may ask for, so that a prompt is a function of its messages and the configuration.

A template may ask for the date (`strftime_now`), which is `data.date` here and never the clock, and for keys such as `enable_thinking`,
which come from `data.chat_template_kwargs`.
"""

import datetime
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError


class ChatTemplate:
    """Renders messages with the chat template of a tokenizer, which must have one."""

    def __init__(self, tokenizer: Any, data: DataConfig) -> None:
        now = datetime.datetime.combine(data.date, datetime.time())
        self._tokenizer, self._kwargs = tokenizer, data.chat_template_kwargs
        self._options = {"strftime_now": now.strftime, **data.chat_template_kwargs}

    def has_generation_prompt(self) -> bool:
        """Return whether the template begins the assistant's message."""
        question = [{"role": "user", "content": "What is 1 + 1?"}]
        return self.render(question) != self._tokenizer.apply_chat_template(question, tokenize=False, **self._options)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of a chat up to where the assistant begins to respond. Raise what the template raises."""
        options = {"tools": [*map(dict, tools)] or None, "tokenize": False, "add_generation_prompt": True, **self._options}
        try:
            text: str = self._tokenizer.apply_chat_template([*map(dict, messages)], **options)
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            text = self._tokenizer.apply_chat_template([_write_arguments(message) for message in messages], **options)
        return text

    def check(self) -> None:
        """Raise UserError if the template does not use a key of `data.chat_template_kwargs`, or draws random text."""
        if not isinstance(templates := self._tokenizer.chat_template, Mapping):
            templates = {"default": templates}
        from jinja2 import TemplateSyntaxError, meta, nodes
        from transformers.utils.chat_template_utils import _compile_jinja_template as compile_template

        name, known = self._tokenizer.name_or_path, set[str]()
        for template in templates.values():
            try:
                tree = compile_template(template).environment.parse(template)
            except TemplateSyntaxError:
                return  # rendering reports it
            known |= meta.find_undeclared_variables(tree)
            filters = {each.name for each in tree.find_all(nodes.Filter)}
            calls = {each.node.name for each in tree.find_all(nodes.Call) if isinstance(each.node, nodes.Name)}
            if "random" in filters or "lipsum" in calls:
                rule = f"the chat template of {name} draws random text, so a resumed run would ask other questions"
                raise UserError("data.chat", None, rule, "correct the template")
        given = set(inspect.signature(self._tokenizer.apply_chat_template).parameters) | {"messages", "strftime_now"}
        usable = sorted(known - given - set(self._tokenizer.special_tokens_map))
        for key in self._kwargs:
            if key not in usable:
                choices = f"it uses {', '.join(usable)}" if usable else "it uses none"
                rule = f"the chat template of {name} does not use this key; {choices}"
                raise UserError("data.chat_template_kwargs", key, rule, "correct or remove it")


def _write_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as JSON text, which some templates, as DeepSeek-V3's, append to a text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, **({"tool_calls": calls} if calls else {})}
