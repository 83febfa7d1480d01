"""Prompts from template texts, template files and chat templates, and what is refused."""

from __future__ import annotations

import pytest

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.config.data import DataConfig
from megatron_rl.data import check_data
from megatron_rl.data.prompt_template import list_oddities, make_prompt_formatter
from megatron_rl.errors import UserError
from megatron_rl.hf.tokenizer import load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_byte_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def chat(tokenizer):
    """Return the prompt of a question with a chat template and fields of `DataConfig`."""
    tokenizer = tokenizer.__class__(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
    tokenizer.name_or_path = "some/model"

    def ask(question: str, template: str | None = CHATML, **data: object) -> str:
        tokenizer.chat_template = template
        return make_prompt_formatter(DataConfig(chat=True, **data), tokenizer)(question)

    return ask


def test_the_template_is_plain_text_or_a_file(tokenizer, tmp_path):
    ask = make_prompt_formatter(DataConfig(prompt_template="Q: {question} {braces}\n\\boxed{}"), tokenizer)
    assert ask("what is {x} in {question}?") == "Q: what is {x} in {question}? {braces}\n\\boxed{}"
    file = tmp_path / "ask.txt"
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text("Frage: {question}\nAntwort – ", encoding=encoding)
        assert make_prompt_formatter(DataConfig(prompt_template_file=file), tokenizer)("1+1?") == "Frage: 1+1?\nAntwort – "


@pytest.mark.parametrize(
    "content, wrong",
    [(b"no place", "does not contain {question}"), (b"\xff{question}", "it is not UTF-8"), (None, "No such file or directory")],
)
def test_an_invalid_template_file_is_refused(model, tmp_path, content, wrong):
    file = tmp_path / "ask.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"data.prompt_template_file = .*{wrong}"):
        check_data(DataConfig(prompt_template_file=file, train="examples.arithmetic.task:Arithmetic"), model)


def test_what_a_prompt_ends_with_is_said(tokenizer, tmp_path):
    (tmp_path / "ask.txt").write_text("Q: {question}\n")
    tokenizer.chat_template = "{% for message in messages %}[INST]{{ message.content }}[/INST]{% endfor %}"
    line, template = list_oddities(DataConfig(chat=True, prompt_template_file=tmp_path / "ask.txt"), tokenizer)
    assert line.endswith("ask.txt ends with a line break, which is part of every prompt") and "has no generation prompt" in template
    tokenizer.chat_template = CHATML
    assert not list_oddities(DataConfig(chat=True), tokenizer)


def test_the_chat_contains_template_and_system_message(chat):
    assert chat("1+1?") == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    result = chat("1+1?", prompt_template="{question} Put it into \\boxed{}.", system_prompt="Be brief.")
    assert result.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1? Put it into \\boxed{}.<|im_end|>\n")


@pytest.mark.parametrize(
    "template, system_prompt, line",
    [
        (None, "", "data.chat: the tokenizer of some/model has no chat template; set it to false, or add chat_template.jinja to that fol"),
        ("{{ messages[0].content }}", "Be brief.", "data.chat: the chat template of some/model leaves out the question"),
        ("{{ messages[-1].content }}", "Be brief.", "data.system_prompt: the chat template of some/model leaves it out"),
        (
            "{{ raise_exception('No.') }}",
            "Be brief.",
            "data.chat: the chat template of some/model fails on messages of system, user (No.); ",
        ),
        ("{% if", "", "data.chat: the chat template of some/model fails on messages of user ("),
    ],
)
def test_an_unusable_chat_template_is_refused(chat, template, system_prompt, line):
    with pytest.raises(UserError) as caught:
        chat("1+1?", template, system_prompt=system_prompt)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_preflight_checks_the_chat_template_of_the_model(tmp_path):
    make_byte_tokenizer(tmp_path)
    with pytest.raises(UserError, match=f"data.chat: the tokenizer of {tmp_path} has no chat template"):
        check_data(DataConfig(chat=True, train="examples.arithmetic.task:Arithmetic"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    check_data(DataConfig(chat=True, train="examples.arithmetic.task:Arithmetic"), tmp_path)
