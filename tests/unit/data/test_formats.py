"""Files in the formats of published data sets: equal problems, one line for each mistake, and the real files if they are there."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.formats import RowError, math, read_row
from megatron_rl.data.sets import read_problem_set
from megatron_rl.errors import UserError
from megatron_rl.plugs import DATA_FORMATS

ROWS = [{"question": f"How many {{clips}} of {n}?", "answer": f"so\n#### 1,07{n}", "note": "x"} for n in range(3)]
GOOD = json.dumps(ROWS[0]).encode()


def write(folder: Path, content: bytes, name: str = "train.jsonl") -> Path:
    path = folder / "gsm8k" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def read(path: Path, format: str | None = "gsm8k", name: str = ""):
    return read_problem_set(DataSourceConfig(source=str(path), name=name), DataConfig(format=format), "data.train")


def test_a_row_becomes_a_problem(tmp_path):
    [problem] = read(write(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n\n"))
    assert (problem.prompt, problem.answer) == ("How many {clips} of 0?", "1070")
    assert (problem.id, problem.source, problem.level) == ("gsm8k/train:1", "gsm8k/train", 0)
    named = DataSourceConfig(source=str(tmp_path / "gsm8k" / "train.jsonl"), name="sums", format="gsm8k")
    [problem] = read_problem_set(named, DataConfig(format="math"), "data.eval")
    assert (problem.id, problem.source) == ("sums:1", "sums"), "a set can have its own name and format"


def test_all_kinds_of_files_give_the_same_problems(tmp_path):
    lines = write(tmp_path, "\n".join(map(json.dumps, ROWS)).encode())
    array = write(tmp_path, b" \n" + json.dumps(ROWS, indent=2).encode(), "train.json")
    lines_in_json = write(tmp_path, lines.read_bytes(), "lines.json")
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
    path = write(tmp_path, GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"data.train = '{path}:3': ") and wrong in message and "\n" not in message


def test_a_missing_format_is_suggested(tmp_path):
    with pytest.raises(UserError, match=r'needs a format; its fields are question, answer, note; set format = "gsm8k"$'):
        read(write(tmp_path, GOOD), None)
    with pytest.raises(UserError, match=r"its fields are x; set columns to the names of question and answer, e"):
        read(write(tmp_path, b'{"x": 1}'), None)
    with pytest.raises(UserError, match="train.json:2': must be a JSON object, not int"):
        read(write(tmp_path, json.dumps([ROWS[0], 3]).encode(), "train.json"))


def test_missing_invalid_and_empty_files_are_refused(tmp_path):
    for name, wrong in (("absent.jsonl", "does not exist"), (".", "is a folder")):
        with pytest.raises(UserError, match=f"data.train = .*{wrong}"):
            read(tmp_path / name)
    with pytest.raises(UserError, match=r"a.parquet': is not a readable Parquet file \(Parquet magic bytes not found"):
        read(write(tmp_path, GOOD * 9, "a.parquet"))
    for name, content in (("a.jsonl", b"\n \n"), ("a.json", b"[]"), ("a.json", b"")):
        with pytest.raises(UserError, match="contains no problems"):
            read(write(tmp_path, content, name))


def test_rows_without_a_gold_answer_are_dropped(tmp_path, caplog):
    rows = [ROWS[0], {"question": "q", "answer": None}, {"question": "q", "answer": " "}, {"question": "q", "answer": "12 ####"}, ROWS[1]]
    assert len(read(write(tmp_path, "\n".join(map(json.dumps, rows)).encode()))) == 2
    assert "dropped 3 rows without a gold answer, first row 2" in caplog.text
    with pytest.raises(UserError, match="contains no problems with a gold answer"):
        read(write(tmp_path, json.dumps(rows[1]).encode()))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary() | st.text().map(str.encode) | st.dictionaries(st.text(), st.text()).map(json.dumps).map(str.encode),
    st.sampled_from(["train.jsonl", "train.json", "train.parquet"]),
    st.sampled_from(["gsm8k", "math", None]),
)
def test_all_content_is_refused_with_a_user_error(tmp_path, content, name, format):
    with pytest.raises(UserError):  # no generated content has all fields
        read(write(tmp_path, content, name), format)


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
