"""Tools and tool calls of rows: the prompts from JSON and Parquet, and the error for each mistake."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config.data import ColumnsConfig, DataConfig
from megatron_rl.data.chat import check_own_chat, read_tools
from megatron_rl.data.formats import RowError
from megatron_rl.data.sets import read_columns
from megatron_rl.errors import UserError

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
def load(model, load_prompts):
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return lambda rows, columns=COLUMNS: load_prompts(rows, columns=columns, max_prompt_tokens=2000)


def test_json_texts_and_parquet_give_the_same_prompt(tmp_path, load, write):
    texts = [{**CALL, "function": {**CALL["function"], "arguments": '{"a": 1, "b": 1}'}}]
    as_text = {**ROW, "tools": json.dumps([ADD]), "messages": [CHAT[0], {**CHAT[1], "tool_calls": texts}, *CHAT[2:]]}
    assert load(write(ROW)) == load(write(as_text)) == [PROMPT]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()
    assert table[0]["messages"][0]["tool_calls"] is None  # added by Arrow
    assert load(tmp_path / "rows.parquet") == [PROMPT]


def test_questions_with_different_tools_are_different_problems(load, write):
    other = {"type": "function", "function": {**ADD["function"], "name": "sum"}}
    rows = write(*({"q": "1+1?", "tools": tools, "answer": "2"} for tools in ([ADD], [ADD], [other], [], None)))
    prompts = load(rows, {"question": "q", "tools": "tools", "answer": "answer"})
    assert prompts == ["<user>1+1?<assistant>", *sorted(f"[{json.dumps(t['function'])}]<user>1+1?<assistant>" for t in (ADD, other))]


def test_a_template_that_leaves_tools_out_is_refused(model, load, write):
    (model / "chat_template.jinja").write_text(PLAIN)
    with pytest.raises(UserError, match=r"data.chat: the chat template of .* leaves out the tool 'add'; use a tokenizer whose template"):
        load(write(ROW))


def changed(index: int, **fields: object) -> dict[str, object]:
    return {**ROW, "messages": [{**message, **fields} if place == index else message for place, message in enumerate(CHAT)]}


def calling(arguments: str) -> dict[str, object]:
    return changed(1, tool_calls=[{"function": {"name": "add", "arguments": arguments}}])


def function(**fields: object) -> dict[str, object]:
    return {**ROW, "tools": [{"type": "function", "function": {"name": "add", **fields}}]}


BAD_SCHEMA = "tools[0].function.parameters must be the JSON schema of an object ("


@pytest.mark.parametrize(
    "row, line",
    [
        ({**ROW, "tools": {}}, "tools must be a list of tools, or its JSON text, not dict; correct or remove"),
        ({**ROW, "tools": "[{"}, "tools is not JSON ("),
        ({**ROW, "tools": [ADD["function"]]}, 'tools[0] must have type = "function" and a function; write {"type": "function", "fu'),
        ({**ROW, "tools": [ADD, ADD]}, "tools[1].function.name must be a unique, nonempty name, not 'add'; "),
        (function(parameters={"type": "objekt"}), BAD_SCHEMA + "it has another type); "),
        (function(parameters={"properties": {"a": {"type": "int"}}}), BAD_SCHEMA + "$.properties.a.type: 'int' is not valid"),
        ({**ROW, "tools": None}, "messages[1] calls 'add', which is not one of the row's tools (none); add its schema, or"),
        (changed(0, tool_calls=[CALL]), "messages[0].tool_calls must be a list, in an assistant message; "),
        (changed(1, tool_calls=["add"]), "messages[1].tool_calls[0] must have a function with a name; write "),
        (calling("[1]"), "messages[1].tool_calls[0].function.arguments must be a JSON object, not list; "),
        (calling("a=1"), "messages[1].tool_calls[0].function.arguments is not JSON ("),
        (changed(2, tool_call_id="c2"), "messages[2].tool_call_id must be the id of an earlier call, not 'c2'; "),
        (changed(2, tool_call_id=7), "messages[2].tool_call_id must be a string, not int; "),
        (changed(2, content=None), "messages[2] must have role and content, found role, tool_call_id, name; "),
    ],
)
def test_each_mistake_is_one_line(row, line):
    with pytest.raises(RowError) as caught:
        read_columns(ColumnsConfig(**COLUMNS), row)
    message = f"{caught.value.rule}; {caught.value.fix}"
    assert message.startswith(f"the field {line}") and "\n" not in message


def test_tools_of_a_custom_format_are_checked():
    check_own_chat(CHAT[:4], [ADD])
    for history, tools, line in (((), [{"name": "add"}], "must have type = "), (CHAT[:4], [], "which is not one of the row's tools")):
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
def test_any_tools_are_read_or_refused_with_one_line(value):
    for tools in (value, json.dumps(value), [{"type": "function", "function": {"name": "f", "parameters": value}}]):
        refused, read = "", ()
        try:
            read = read_tools(tools, "tools")
        except RowError as error:
            refused = error.rule
        assert "\n" not in refused
        assert all(tool["function"]["name"].strip() for tool in read)
