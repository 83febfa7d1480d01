"""Rows read by the names of their columns, and the error for columns that are missing."""

from __future__ import annotations

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from megatron_rl.config.data import ColumnsConfig, DataConfig
from megatron_rl.data.formats import RowError
from megatron_rl.data.sets import read_columns, read_set
from megatron_rl.errors import UserError

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
VERL = {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}, "data_source": "x"}
SYSTEM, USER, REPLY = ({"role": role, "content": content} for role, content in (("system", "S"), ("user", "1+1?"), ("assistant", "2")))


@pytest.mark.parametrize(
    "columns, row, question, gold",
    [
        ({"question": "prompt", "answer": "target"}, {"prompt": "1+1?", "target": " 2 "}, "1+1?", "2"),
        ({"question": "q", "answer": "a", "level": "hard"}, {"q": "1+1?", "a": 2, "hard": 3}, "1+1?", "2"),
        ({"question": "q", "answer": "a"}, {"q": "1/2?", "a": 0.5}, "1/2?", "0.5"),
        ({"question": "q", "answer": "a"}, {"q": "1+1?", "a": None}, "1+1?", ""),
        ({"question": "a.b", "answer": "c.d.e"}, {"a.b": "1+1?", "c": {"d": {"e": "2"}}}, "1+1?", "2"),
        ({"messages": "prompt", "answer": "reward_model.ground_truth"}, VERL, "1+1?", "2"),
        ({"messages": "messages"}, {"messages": [SYSTEM, USER, REPLY]}, "1+1?", "2"),
        ({"messages": "messages", "answer": "gold"}, {"messages": [USER, REPLY], "gold": "two"}, "1+1?", "two"),
    ],
)
def test_rows_are_read_by_column_names(columns, row, question, gold):
    result = read_columns(ColumnsConfig(**columns), row)
    assert (result.question, result.gold, result.level) == (question, gold, row.get("hard", 0))


def test_messages_before_the_question_are_kept():
    chat = [SYSTEM, USER, REPLY, {"role": "user", "content": "And 2+2?"}, {"role": "assistant", "content": "4"}]
    result = read_columns(ColumnsConfig(messages="messages"), {"messages": chat})
    assert (result.question, result.gold) == ("And 2+2?", "4")
    assert result.history == (SYSTEM, USER, REPLY)


TEXTS, CHAT = {"question": "x", "answer": "y"}, {"messages": "x"}


@pytest.mark.parametrize(
    "columns, row, line",
    [
        (
            {"question": "q", "answer": "a"},
            {"x": 1, "y": {"z": 1}},
            "has no field q, found x, y.z; set data.columns.question to one of them",
        ),
        ({"question": "x", "answer": "y.a"}, {"x": "1", "y": {"z": 1}}, "has no field y.a, found x, y.z; set data.columns.answer to one"),
        (TEXTS, {"x": [1], "y": "1"}, "the field x must be a string, not list; correct or remove this row"),
        (TEXTS, {"x": " ", "y": "1"}, "the field x is empty; "),
        (TEXTS, {"x": "1", "y": True}, "the field y must be a string, not bool; "),
        (CHAT, {"x": []}, 'the field x must be a list of messages [{"role": "user", "content": "..."}], not an empty one; '),
        (CHAT, {"x": "1+1?"}, 'the field x must be a list of messages [{"role": "user", "content": "..."}], not str; '),
        (CHAT, {"x": [{"from": "human", "value": "1"}]}, "the field x[0] must have role and content, found from, value; use a custom"),
        (CHAT, {"x": [{**USER, "role": "human"}]}, "the field x[0].role must be one of system, user, assistant, tool, not 'human'"),
        (CHAT, {"x": [{**USER, "content": 1}]}, "the field x[0].content must be a string, not int; "),
        (
            CHAT,
            {"x": [{**USER, "content": [1]}]},
            "the field x[0].content[0] is of type 'int', and only text is supported; remove this row",
        ),
        (
            CHAT,
            {"x": [{**USER, "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "u"}]}]},
            "the field x[0].content[1] is of type 'image', and only text is supported; remove this row",
        ),
        (CHAT, {"x": [{**USER, "content": [{"type": "text"}]}]}, "the field x[0].content[0].text must be a string, not NoneType; "),
        (CHAT, {"x": [SYSTEM, REPLY]}, "the field x must end with a user message, or a user and an assistant message; its roles are s"),
        (CHAT, {"x": [REPLY]}, "the field x must end with a user message, or a user and an assistant message; its roles are assistant"),
    ],
)
def test_each_mistake_is_one_line(columns, row, line):
    with pytest.raises(RowError) as caught:
        read_columns(ColumnsConfig(**columns), row)
    assert f"{caught.value.rule}; {caught.value.fix}".startswith(line)


def test_parts_of_text_are_joined_and_developers_are_the_system():
    parts = [{"type": "text", "text": "1"}, {"type": "input_text", "text": "+1?", "image_url": None}, {"text": "!"}]
    row = read_columns(
        ColumnsConfig(messages="x"), {"x": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, REPLY]}
    )
    assert row.question == "1+1?!" and row.history == ({"role": "system", "content": "s"},)


def test_errors_name_the_row(tmp_path, write):
    table = pyarrow.Table.from_pylist([VERL, {**VERL, "reward_model": {"ground_truth": "3", "style": "rule"}}])
    pyarrow.parquet.write_table(table, tmp_path / "verl.parquet")
    columns = {"messages": "prompt", "answer": "reward_model.ground_truth"}
    data = DataConfig.model_validate({"train": str(tmp_path / "verl.parquet"), "columns": columns, "chat": True})
    assert [problem.answer for problem in read_set(data.train[0], data, "data.train").problems] == ["2", "3"]
    rows = write({"q": "1+1?", "a": "2"}, {"q": "2+2?"})
    data = DataConfig.model_validate({"train": rows, "columns": {"question": "q", "answer": "a"}})
    with pytest.raises(UserError) as caught:
        read_set(data.train[0], data, "data.train")
    assert str(caught.value) == f"data.train = '{rows}:2': has no field a, found q; set data.columns.answer to one of them"


def test_the_configured_system_message_replaces_the_one_of_the_chat(model, write, load_prompts):
    (model / "chat_template.jinja").write_text(CHATML)
    follow_up = {"role": "user", "content": "And 2+2?"}
    rows = write({"chat": [SYSTEM, USER, REPLY]}, {"chat": [SYSTEM, USER, REPLY, follow_up, {**REPLY, "content": "4"}]})
    columns = {"messages": "chat"}
    own = ["<system>S<user>1+1?<assistant>", "<system>S<user>1+1?<assistant>2<user>And 2+2?<assistant>"]
    assert load_prompts(rows, columns=columns) == own
    configured = load_prompts(rows, columns=columns, system_prompt="T", prompt_template="Q: {question}")
    assert configured == ["<system>T<user>1+1?<assistant>2<user>Q: And 2+2?<assistant>", "<system>T<user>Q: 1+1?<assistant>"]
    (model / "chat_template.jinja").write_text(STRICT)
    line = r"^data.chat: the chat template of .*/model fails on messages of system, user \(System role not supported\); remove data.sys"
    with pytest.raises(UserError, match=line):
        load_prompts(rows, columns=columns)


def test_the_same_question_after_other_messages_is_another_problem(model, write, load_prompts):
    (model / "chat_template.jinja").write_text(CHATML)
    again = {"role": "user", "content": "Again?"}
    rows = write(*({"chat": [{"role": "user", "content": text}, REPLY, again, REPLY]} for text in ("a", "b", " a ")))
    assert len(load_prompts(rows, columns={"messages": "chat"})) == 3


def test_messages_of_a_custom_format_need_a_chat_template(tmp_path, monkeypatch, write):
    history = ({"role": "system", "content": "S"},)
    read = f"def read(row): return ProblemRow('q', 'a', 0, {history})\n"
    (tmp_path / "own_chat.py").write_text(f"from megatron_rl.data.formats import ProblemRow\n{read}")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = DataConfig.model_validate({"train": write({}), "format": "own_chat:read"})
    with pytest.raises(UserError, match=r"rows.jsonl:1': has tools or messages before the question, which only .*; set data.chat = true"):
        read_set(data.train[0], data, "data.train")


@pytest.mark.parametrize(
    "data, rule",
    [
        ({"columns": {}}, "must set exactly one of question and messages"),
        ({"columns": {"question": "a", "messages": "b"}}, "must set exactly one of question and messages"),
        ({"columns": {"question": "a"}}, "must set answer"),
        ({"columns": {"messages": "a"}}, "columns.messages = 'a' needs chat = true"),
        ({"train": [{"source": "a", "columns": {"messages": "b"}}]}, "columns.messages = 'b' needs chat = true"),
        ({"columns": {"question": "a", "answer": "b"}, "format": "gsm8k"}, "format gsm8k and columns exclude each other"),
        ({"eval": [{"source": "a", "columns": {"question": "a", "answer": "b"}, "format": "math"}]}, "format math and columns exclude"),
    ],
)
def test_incomplete_and_contradictory_columns_are_refused(data, rule):
    with pytest.raises(ValidationError, match=rule):
        DataConfig.model_validate(data)
