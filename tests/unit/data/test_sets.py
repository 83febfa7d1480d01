"""Rows of files: columns by name, tools, prompts from templates, formats of published data sets, and the error for each mistake."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.config.data import ColumnsConfig, DataConfig, DataSourceConfig
from megatron_rl.data import check_data
from megatron_rl.data.chat import check_own_chat, read_tools
from megatron_rl.data.formats import RowError, math, read_row
from megatron_rl.data.prompt_template import make_prompt_formatter
from megatron_rl.data.sets import read_columns, read_problem_set
from megatron_rl.errors import UserError
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.plugs import DATA_FORMATS

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
        (
            {"columns": {"question": "q", "answer": "a", "tools": "t"}},
            "tools = 't' needs chat = true, because only a chat template uses tools",
        ),
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


BAD_SCHEMA = "the field tools[0].function.parameters must be the JSON schema of an object ("


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
        (COLUMNS, {**ROW, "tools": {}}, "the field tools must be a list of tools, or its JSON text, not dict; correct or remove"),
        (COLUMNS, {**ROW, "tools": "[{"}, "the field tools is not JSON ("),
        (
            COLUMNS,
            {**ROW, "tools": [ADD["function"]]},
            'the field tools[0] must have type = "function" and a function; write {"type": "function", "fu',
        ),
        (COLUMNS, {**ROW, "tools": [ADD, ADD]}, "the field tools[1].function.name must be a unique, nonempty name, not 'add'; "),
        (COLUMNS, function(parameters={"type": "objekt"}), BAD_SCHEMA + "it has another type); "),
        (COLUMNS, function(parameters={"properties": {"a": {"type": "int"}}}), BAD_SCHEMA + "$.properties.a.type: 'int' is not valid"),
        (
            COLUMNS,
            {**ROW, "tools": None},
            "the field messages[1] calls 'add', which is not one of the row's tools (none); add its schema, or",
        ),
        (COLUMNS, changed(0, tool_calls=[CALL]), "the field messages[0].tool_calls must be a list, in an assistant message; "),
        (COLUMNS, changed(1, tool_calls=["add"]), "the field messages[1].tool_calls[0] must have a function with a name; write "),
        (COLUMNS, calling("[1]"), "the field messages[1].tool_calls[0].function.arguments must be a JSON object, not list; "),
        (COLUMNS, calling("a=1"), "the field messages[1].tool_calls[0].function.arguments is not JSON ("),
        (COLUMNS, changed(2, tool_call_id="c2"), "the field messages[2].tool_call_id must be the id of an earlier call, not 'c2'; "),
        (COLUMNS, changed(2, tool_call_id=7), "the field messages[2].tool_call_id must be a string, not int; "),
        (COLUMNS, changed(2, content=None), "the field messages[2] must have role and content, found role, tool_call_id, name; "),
    ],
)
def test_each_mistake_is_one_line(columns, row, line):
    with pytest.raises(RowError) as caught:
        read_columns(ColumnsConfig(**columns), row)
    message = f"{caught.value.rule}; {caught.value.fix}"
    assert message.startswith(line) and "\n" not in message


def test_tools_of_a_custom_format_are_checked():
    check_own_chat(CHAT[:4], [ADD])
    for history, tools, line in (((), [{"name": "add"}], "must have type = "), (CHAT[:4], [], "which is not one of the row's tools")):
        with pytest.raises(RowError, match=line):
            check_own_chat(history, tools)


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


@pytest.fixture
def chat(model):
    tokenizer = load_tokenizer(model)
    tokenizer.name_or_path = "some/model"

    def ask(question: str, template: str | None = CHATML, **data: object) -> str:
        tokenizer.chat_template = template
        return make_prompt_formatter(DataConfig(chat=True, **data), tokenizer)(question)

    return ask


def test_the_template_is_plain_text_or_a_file(model, tmp_path):
    tokenizer = load_tokenizer(model)
    ask = make_prompt_formatter(DataConfig(prompt_template="Q: {question} {braces}\n\\boxed{}"), tokenizer)
    assert ask("what is {x} in {question}?") == "Q: what is {x} in {question}? {braces}\n\\boxed{}"
    file = tmp_path / "ask.txt"
    file.write_text("Frage: {question}\nAntwort – ", encoding="utf-8")
    assert make_prompt_formatter(DataConfig(prompt_template_file=file), tokenizer)("1+1?") == "Frage: 1+1?\nAntwort – "


@pytest.mark.parametrize(
    "content, wrong",
    [(b"no place", "does not contain {question}"), (b"\xff{question}", "it is not UTF-8"), (None, "No such file or directory")],
)
def test_an_invalid_template_file_is_refused(tmp_path, content, wrong):
    file = tmp_path / "ask.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"data.prompt_template_file = .*{wrong}"):
        check_data(DataConfig(prompt_template_file=file), tmp_path)


def test_the_chat_contains_template_and_system_message(chat):
    assert chat("1+1?") == "<user>1+1?<assistant>"
    asked = chat("1+1?", prompt_template="{question} Put it into \\boxed{}.", system_prompt="Be brief.")
    assert asked == "<system>Be brief.<user>1+1? Put it into \\boxed{}.<assistant>"


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


def test_preflight_checks_the_chat_template_of_the_model(model):
    data = DataConfig(chat=True, train="examples.arithmetic.task:Arithmetic")
    with pytest.raises(UserError, match=f"data.chat: the tokenizer of {model} has no chat template"):
        check_data(data, model)
    (model / "chat_template.jinja").write_text(CHATML)
    check_data(data, model)


ROWS = [{"question": f"How many {{clips}} of {n}?", "answer": f"so\n#### 1,07{n}", "note": "x"} for n in range(3)]
GOOD = json.dumps(ROWS[0]).encode()


def save(folder: Path, content: bytes, name: str = "train.jsonl") -> Path:
    path = folder / "gsm8k" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def read(path: Path, format: str | None = "gsm8k", name: str = ""):
    return read_problem_set(DataSourceConfig(source=str(path), name=name), DataConfig(format=format), "data.train")


def test_a_row_becomes_a_problem(tmp_path):
    [problem] = read(save(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n\n"))
    assert (problem.prompt, problem.answer) == ("How many {clips} of 0?", "1070")
    assert (problem.id, problem.source, problem.level) == ("gsm8k/train:1", "gsm8k/train", 0)
    named = DataSourceConfig(source=str(tmp_path / "gsm8k" / "train.jsonl"), name="sums", format="gsm8k")
    [problem] = read_problem_set(named, DataConfig(format="math"), "data.eval")
    assert (problem.id, problem.source) == ("sums:1", "sums"), "a set can have its own name and format"


def test_all_kinds_of_files_give_the_same_problems(tmp_path):
    lines = save(tmp_path, "\n".join(map(json.dumps, ROWS)).encode())
    array = save(tmp_path, b" \n" + json.dumps(ROWS, indent=2).encode(), "train.json")
    lines_in_json = save(tmp_path, lines.read_bytes(), "lines.json")
    table = tmp_path / "gsm8k" / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table, row_group_size=2)
    expected = read(lines, name="set")
    assert len(expected) == 3
    assert read(array, name="set") == read(lines_in_json, name="set") == read(table, name="set") == expected


def test_errors_in_a_parquet_file_list_all_columns(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["1+1"], "answer": ["2"], "unread": ["x"], "level": ["Level 3"]}), path)
    assert [(p.answer, p.level) for p in read(path, "math")] == [("2", 3)]
    with pytest.raises(UserError, match="parquet:1.: format gsm8k needs the field question, found problem, answer, unread, level; set fo"):
        read(path)


@pytest.mark.parametrize(
    "line, wrong",
    [
        (b'{"question": "q"', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "must be a JSON object, not list"),
        (b'{"question": "q"}', "format gsm8k needs the field answer, found question; correct or remove this row"),
        (b'{"answer": "#### 1"}', "format gsm8k needs the field question, found answer"),
        (b"{}", "found none"),
        (b'{"question": 5, "answer": "#### 1"}', "the field question must be a string, not int"),
        (b'{"question": null, "answer": "#### 1"}', "the field question must be a string, not NoneType"),
        (b'{"question": "q", "answer": ["#### 1"]}', "the field answer must be a string, not list"),
        (b'{"question": "q", "answer": true}', "the field answer must be a string, not bool"),
        (b'{"question": " ", "answer": "#### 1"}', "the field question is empty"),
        (b'{"question": "q", "answer": "12"}', 'has no #### before the gold answer; correct or remove this row, or set format = "aime"'),
        (b'{"question": "\xff", "answer": "#### 1"}', "is not UTF-8"),
        (b'{"question": "\\ud800", "answer": "#### 1"}', "lone surrogate"),
    ],
)
def test_errors_name_the_malformed_line(tmp_path, line, wrong):
    path = save(tmp_path, GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"data.train = '{path}:3': ") and wrong in message and "\n" not in message


def test_a_missing_format_is_suggested(tmp_path):
    with pytest.raises(UserError, match=r'needs a format; its fields are question, answer, note; set format = "gsm8k"$'):
        read(save(tmp_path, GOOD), None)
    with pytest.raises(UserError, match=r"its fields are x; set columns to the names of question and answer, e"):
        read(save(tmp_path, b'{"x": 1}'), None)
    with pytest.raises(UserError, match="train.json:2': must be a JSON object, not int"):
        read(save(tmp_path, json.dumps([ROWS[0], 3]).encode(), "train.json"))


def test_missing_invalid_and_empty_files_are_refused(tmp_path):
    for name, wrong in (("absent.jsonl", "does not exist"), (".", "is a folder")):
        with pytest.raises(UserError, match=f"data.train = .*{wrong}"):
            read(tmp_path / name)
    with pytest.raises(UserError, match=r"a.parquet': is not a readable Parquet file \(Parquet magic bytes not found"):
        read(save(tmp_path, GOOD * 9, "a.parquet"))
    for name, content in (("a.jsonl", b"\n \n"), ("a.json", b"[]"), ("a.json", b"")):
        with pytest.raises(UserError, match="contains no problems"):
            read(save(tmp_path, content, name))


def test_rows_without_a_gold_answer_are_dropped(tmp_path, caplog):
    rows = [ROWS[0], {"question": "q", "answer": None}, {"question": "q", "answer": " "}, {"question": "q", "answer": "12 ####"}, ROWS[1]]
    assert len(read(save(tmp_path, "\n".join(map(json.dumps, rows)).encode()))) == 2
    assert "dropped 3 rows without a gold answer, first row 2" in caplog.text
    with pytest.raises(UserError, match="contains no problems with a gold answer"):
        read(save(tmp_path, json.dumps(rows[1]).encode()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary() | st.text().map(str.encode) | st.dictionaries(st.text(), st.text()).map(json.dumps).map(str.encode),
    st.sampled_from(["train.jsonl", "train.json", "train.parquet"]),
    st.sampled_from(["gsm8k", "math", None]),
)
def test_all_content_is_refused_with_a_user_error(tmp_path, content, name, format):
    with pytest.raises(UserError):  # no generated content has all fields
        read(save(tmp_path, content, name), format)


REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"
MATH_SOLUTION = r"We have $\frac{1}{1} = \boxed{9}$ or rather $\boxed{\left( 3, \frac{\pi}{2} \right)}.$"


@pytest.mark.parametrize(
    "format, row, gold, level",
    [
        ("gsm8k", {"question": "q", "answer": "48/2 = <<48/2=24>>24 clips.\n#### 1,072"}, "1072", 0),
        ("gsm8k", {"question": "q", "answer": "#### -1,234,567"}, "-1234567", 0),
        ("gsm8k", {"question": "q", "answer": "#### 1,080.5"}, "1080.5", 0),
        ("gsm8k", {"question": "q", "answer": "#### (1,234)"}, "(1,234)", 0),
        # Hendrycks' own files, MATH-500, deepscaler's file
        ("math", {"problem": "q", "level": "Level 5", "type": "Algebra", "solution": MATH_SOLUTION}, r"\left( 3, \frac{\pi}{2} \right)", 5),
        ("math", {"problem": "q", "level": "Level ?", "type": "Geometry", "solution": r"so \fbox{7}"}, "7", 0),
        ("math", {"problem": "q", "level": "Level 1", "solution": r"is $\boxed 2$."}, "2", 1),
        ("math", {"problem": "q", "solution": MATH_SOLUTION, "answer": "p - q", "level": 2, "unique_id": "t/1"}, "p - q", 2),
        ("math", {"problem": "q", "answer": "0", "difficulty": 5.0, "type": "Algebra"}, "0", 5),
        ("math", {"problem": "q", "answer": None, "solution": r"\boxed{4}"}, "4", 0),
        ("math", {"problem": "q", "answer": "", "difficulty": 5.0}, "", 5),
        # zwhe99/DeepMath-103K, and its sample in ROLL
        ("deepmath", {"question": "q", "final_answer": r"\dfrac12", "difficulty": 4.5, "topic": "t"}, r"\dfrac12", 4),
        ("deepmath", {"id": "1", "prompt": "q", "ground_truth": "x", "difficulty": "9.5", "messages": "[]"}, "x", 9),
        ("deepmath", {"question": "q", "final_answer": "0", "difficulty": -1.0}, "0", 0),
        # as published by Maxwell-Jia, HuggingFaceH4, opencompass, NeMo-Skills
        ("aime", {"ID": "2024-II-4", "Problem": "q", "Solution": "s", "Answer": 33}, "33", 0),
        ("aime", {"id": 60, "problem": "q", "solution": "s", "answer": "073", "url": "u", "year": "2024"}, "73", 0),
        ("aime", {"question": "q", "answer": r"336^\circ"}, "336", 0),
        ("aime", {"problem": "q", "reference_solution": "s", "expected_answer": "0", "source": "aime24"}, "0", 0),
    ],
)
def test_a_row_of_each_published_data_set(format, row, gold, level):
    result = read_row(row, format, DATA_FORMATS.load(format))
    assert (result.question, result.gold, result.level) == ("q", gold, level)


@pytest.mark.parametrize(
    "format, row, wrong",
    [
        ("gsm8k", {"problem": "q", "answer": "-5"}, 'needs the field question, found problem, answer; set format = "math"'),
        ("math", {"question": "q", "answer": "so #### 5"}, 'needs the field problem, found question, answer; set format = "gsm8k"'),
        ("math", {"question": "q", "final_answer": "5"}, 'set format = "deepmath"'),
        ("math", {"problem": "q", "answer_key": "5"}, "needs the field answer or solution, found problem, answer_key; correct or"),
        ("math", {"problem": "q", "solution": "so 5"}, r"the field solution has no \boxed{}"),
        ("math", {"problem": "q", "solution": r"\boxed{5"}, r"the field solution has no \boxed{}"),
        ("aime", {"problem": "q", "answer": "1000"}, "must be an integer from 0 to 999, not '1000'"),
        ("aime", {"problem": "q", "answer": "-1"}, "must be an integer from 0 to 999, not '-1'"),
        ("math", {"problem": "q", "question": "q", "solution": "x", "final_answer": "5"}, 'remove this row, or set format = "deepmath"'),
    ],
)
def test_rows_of_another_format_are_refused_with_a_suggestion(format, row, wrong):
    with pytest.raises(RowError) as caught:
        read_row(row, format, DATA_FORMATS.load(format))
    assert wrong in f"{caught.value.rule}; {caught.value.fix}"


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the real data sets are not at {REAL}")
@pytest.mark.parametrize(
    "file, format, levels",
    [
        ("gsm8k/train.jsonl", "gsm8k", {0: 7473}),
        ("gsm8k/test.jsonl", "gsm8k", {0: 1319}),
        ("math500/test.jsonl", "math", {1: 43, 2: 90, 3: 105, 4: 128, 5: 134}),
        ("math_train/math.json", "math", {0: 2, 1: 564, 2: 1345, 3: 1582, 4: 1681, 5: 2296}),  # 4 of 7474 rows have no answer
        ("deepmath_sample/math_deepmath_deal.jsonl", "deepmath", {1: 3, 2: 8, 3: 200, 4: 478, 5: 1511, 6: 1224, 7: 742, 8: 760, 9: 68}),
        ("aime24/test.jsonl", "aime", {0: 30}),
    ],
)
def test_the_real_files_are_read(file, format, levels):
    problems = read_problem_set(DataSourceConfig(source=str(REAL / file)), DataConfig(format=format), "data.eval")
    assert Counter(problem.level for problem in problems) == levels


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the real data sets are not at {REAL}")
def test_the_boxed_answers_of_real_solutions_match_the_published_answers():
    rows = [json.loads(line) for line in (REAL / "math500/test.jsonl").read_text().splitlines()]
    boxed = [math({"problem": row["problem"], "solution": row["solution"]}).gold for row in rows]
    assert sum(result == row["answer"] for result, row in zip(boxed, rows, strict=True)) >= 490
