"""Rows read by the names of their columns, with tools and tool calls; prompts from templates; and the error for each mistake."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.config.data import ColumnsConfig, DataConfig
from megatron_rl.data import check_data
from megatron_rl.data.chat import check_own_chat, read_tools
from megatron_rl.data.formats import RowError
from megatron_rl.data.prompt_template import make_prompt_formatter
from megatron_rl.data.sets import read_columns, read_problem_set
from megatron_rl.errors import UserError
from megatron_rl.hf.tokenizer import load_tokenizer

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


TEXTS, LIST = {"question": "x", "answer": "y"}, {"messages": "x"}


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
        (LIST, {"x": "1+1?"}, 'the field x must be a list of messages [{"role": "user", "content": "..."}], not str; '),
        (LIST, {"x": [{"from": "human", "value": "1"}]}, "the field x[0] must have role and content, found from, value; use a custom"),
        (LIST, {"x": [{**USER, "role": "human"}]}, "the field x[0].role must be one of system, user, assistant, tool, not 'human'"),
        (LIST, {"x": [{**USER, "content": [1]}]}, "the field x[0].content must be a string, not list; "),
        (LIST, {"x": [SYSTEM, REPLY]}, "the field x must end with a user message, or a user and an assistant message; its roles are s"),
        (LIST, {"x": [REPLY]}, "the field x must end with a user message, or a user and an assistant message; its roles are assistant"),
    ],
)
def test_each_mistake_is_one_line(columns, row, line):
    with pytest.raises(RowError) as caught:
        read_columns(ColumnsConfig(**columns), row)
    assert f"{caught.value.rule}; {caught.value.fix}".startswith(line)


def test_errors_name_the_row(tmp_path, write):
    table = pyarrow.Table.from_pylist([VERL, {**VERL, "reward_model": {"ground_truth": "3", "style": "rule"}}])
    pyarrow.parquet.write_table(table, tmp_path / "verl.parquet")
    columns = {"messages": "prompt", "answer": "reward_model.ground_truth"}
    data = DataConfig.model_validate({"train": str(tmp_path / "verl.parquet"), "columns": columns, "chat": True})
    assert [problem.answer for problem in read_problem_set(data.train[0], data, "data.train")] == ["2", "3"]
    rows = write({"q": "1+1?", "a": "2"}, {"q": "2+2?"})
    data = DataConfig.model_validate({"train": rows, "columns": {"question": "q", "answer": "a"}})
    with pytest.raises(UserError) as caught:
        read_problem_set(data.train[0], data, "data.train")
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
    assert len(load_prompts(rows, columns={"messages": "chat"})) == 2


def test_messages_of_a_custom_format_need_a_chat_template(tmp_path, monkeypatch, write):
    history = ({"role": "system", "content": "S"},)
    read = f"def read(row): return ProblemRow('q', 'a', 0, {history})\n"
    (tmp_path / "own_chat.py").write_text(f"from megatron_rl.data.formats import ProblemRow\n{read}")
    monkeypatch.syspath_prepend(str(tmp_path))
    data = DataConfig.model_validate({"train": write({}), "format": "own_chat:read"})
    with pytest.raises(UserError, match=r"rows.jsonl:1': has tools or messages before the question, which only .*; set data.chat = true"):
        read_problem_set(data.train[0], data, "data.train")


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
def test_each_mistake_in_tools_is_one_line(row, line):
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


CHATML_IM = (
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

    def ask(question: str, template: str | None = CHATML_IM, **data: object) -> str:
        tokenizer.chat_template = template
        return make_prompt_formatter(DataConfig(chat=True, **data), tokenizer)(question)

    return ask


def test_the_template_is_plain_text_or_a_file(tokenizer, tmp_path):
    ask = make_prompt_formatter(DataConfig(prompt_template="Q: {question} {braces}\n\\boxed{}"), tokenizer)
    assert ask("what is {x} in {question}?") == "Q: what is {x} in {question}? {braces}\n\\boxed{}"
    file = tmp_path / "ask.txt"
    file.write_text("Frage: {question}\nAntwort – ", encoding="utf-8")
    assert make_prompt_formatter(DataConfig(prompt_template_file=file), tokenizer)("1+1?") == "Frage: 1+1?\nAntwort – "


@pytest.mark.parametrize(
    "content, wrong",
    [(b"no place", "does not contain {question}"), (b"\xff{question}", "it is not UTF-8"), (None, "No such file or directory")],
)
def test_an_invalid_template_file_is_refused(tokenizer, tmp_path, content, wrong):
    file = tmp_path / "ask.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"data.prompt_template_file = .*{wrong}"):
        check_data(DataConfig(prompt_template_file=file), tmp_path)


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
    (tmp_path / "chat_template.jinja").write_text(CHATML_IM)
    check_data(DataConfig(chat=True, train="examples.arithmetic.task:Arithmetic"), tmp_path)
