"""Tools and calls in rows: what the chat template makes of them, from JSON and Parquet alike, and the one line about each fault."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.config import Config, ModelConfig
from megatron_rl.config.data import ColumnsConfig, DataConfig
from megatron_rl.data import check_data, load_problems
from megatron_rl.data.chat import check_own_chat, read_tools
from megatron_rl.data.columns import read_columns
from megatron_rl.data.formats import RowError
from megatron_rl.errors import UserError
from megatron_rl.hf.tokenizer import load_tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endfor %}<assistant>"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
CHAT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2+2?"},
]
COLUMNS = {"messages": "messages", "tools": "tools", "answer": "answer"}
ROW = {"messages": CHAT, "tools": [ADD], "answer": "4"}
PROMPT = f'[{json.dumps(ADD["function"])}]<user>1+1?<assistant>(add {{"a": 1, "b": 1}})<tool>2<assistant>2<user>And 2+2?<assistant>'


@pytest.fixture
def model(tmp_path) -> Path:
    make_byte_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def load(model: Path, rows: Path, columns: dict[str, str] = COLUMNS) -> list[str]:
    data = DataConfig.model_validate({"train": str(rows), "chat": True, "columns": columns, "max_prompt_tokens": 2000})
    check_data(data, model)
    stream, _ = load_problems(Config(model=ModelConfig(path=model), data=data), load_tokenizer(model))
    drawn = stream.next_batch(9)
    assert not any(problem.history or problem.tools for problem in drawn)
    return sorted({problem.prompt for problem in drawn})


def test_json_texts_and_parquet_give_the_same_prompt(tmp_path, model):
    texts = [{**CALL, "function": {**CALL["function"], "arguments": '{"a": 1, "b": 1}'}}]
    as_text = {**ROW, "tools": json.dumps([ADD]), "messages": [CHAT[0], {**CHAT[1], "tool_calls": texts}, *CHAT[2:]]}
    for index, row in enumerate((ROW, as_text)):
        (rows := tmp_path / f"{index}.jsonl").write_text(json.dumps(row))
        assert load(model, rows) == [PROMPT]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert table[0]["messages"][0]["tool_calls"] is None  # filled by Arrow: no field of the row
    assert load(model, tmp_path / "rows.parquet") == [PROMPT]


def test_other_tools_make_another_problem_and_none_are_no_fault(tmp_path, model):
    other = {"type": "function", "function": {**ADD["function"], "name": "sum"}}
    questions = ({"q": "1+1?", "tools": tools, "answer": "2"} for tools in ([ADD], [ADD], [other], [], None))
    (rows := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, questions)))
    prompts = load(model, rows, {"question": "q", "tools": "tools", "answer": "answer"})
    assert prompts == ["<user>1+1?<assistant>", *sorted(f"[{json.dumps(t['function'])}]<user>1+1?<assistant>" for t in (ADD, other))]


def test_a_template_that_leaves_tools_out_is_refused(tmp_path, model):
    (model / "chat_template.jinja").write_text(PLAIN)
    (rows := tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    with pytest.raises(
        UserError, match=r"data.chat: the chat template of .* leaves out the tool 'add'; use a tokenizer whose template knows"
    ):
        load(model, rows)


def changed(index: int, **fields: object) -> dict[str, object]:
    return {**ROW, "messages": [{**message, **fields} if place == index else message for place, message in enumerate(CHAT)]}


@pytest.mark.parametrize(
    "row, line",
    [
        ({**ROW, "tools": {}}, "the field tools must be a list of tools, or its JSON text, not dict; correct or remove"),
        ({**ROW, "tools": "[{"}, "the field tools is not JSON ("),
        ({**ROW, "tools": [ADD["function"]]}, 'the field tools[0] must have type function, and function; write {"type": "function", "fu'),
        ({**ROW, "tools": [ADD, ADD]}, "the field tools[1].function.name must be a name of its own, not 'add'; "),
        (
            {**ROW, "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "objekt"}}}]},
            "the field tools[0].function.parameters must be the JSON schema of an object (its type is another); ",
        ),
        (
            {**ROW, "tools": [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "int"}}}}}]},
            "the field tools[0].function.parameters must be the JSON schema of an object ($.properties.a.type: 'int' is not valid",
        ),
        ({**ROW, "tools": None}, "the field messages[1] calls 'add', which is none of the row's tools (it has none); add its schema, or"),
        (changed(0, tool_calls=[CALL]), "the field messages[0].tool_calls must be a list, in a message of the assistant; "),
        (changed(1, tool_calls=["add"]), "the field messages[1].tool_calls[0] must have a function with a name; write "),
        (
            changed(1, tool_calls=[{"function": {"name": "add", "arguments": "[1]"}}]),
            "the field messages[1].tool_calls[0].function.arguments must be a JSON object, not list; ",
        ),
        (
            changed(1, tool_calls=[{"function": {"name": "add", "arguments": "a=1"}}]),
            "the field messages[1].tool_calls[0].function.arguments is not JSON (",
        ),
        (changed(2, tool_call_id="c2"), "the field messages[2].tool_call_id must be that of a call before it, not 'c2'; "),
        (changed(2, tool_call_id=7), "the field messages[2].tool_call_id must be a string, not int; "),
        (changed(2, content=None), "the field messages[2] must have role and content, found role, tool_call_id, name; "),
    ],
)
def test_each_fault_is_one_line(row, line):
    with pytest.raises(RowError) as caught:
        read_columns(ColumnsConfig(**COLUMNS), row)
    message = f"{caught.value.rule}; {caught.value.fix}"
    assert message.startswith(line) and "\n" not in message


def test_tools_of_a_format_of_ones_own_are_checked():
    check_own_chat(CHAT[:4], [ADD])
    for history, tools, line in (((), [{"name": "add"}], "must have type function"), (CHAT[:4], [], "which is none of the row's tools")):
        with pytest.raises(RowError, match=line):
            check_own_chat(history, tools)


def test_tools_need_a_chat_template():
    with pytest.raises(ValidationError, match="columns.tools = 'tools' needs chat = true, because only a chat template uses tools"):
        DataConfig.model_validate({"columns": {"question": "q", "answer": "a", "tools": "tools"}})


KEYS = st.sampled_from(["type", "function", "name", "parameters", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(KEYS, part, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_whatever_a_row_holds_is_read_or_refused_in_a_line(value):
    for tools in (value, json.dumps(value), [{"type": "function", "function": {"name": "f", "parameters": value}}]):
        refused, read = "", ()
        try:
            read = read_tools(tools, "tools")
        except RowError as error:
            refused = error.rule
        assert "\n" not in refused
        assert all(tool["function"]["name"].strip() for tool in read)
