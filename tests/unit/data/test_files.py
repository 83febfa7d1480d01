"""JSONL, JSON and Parquet files: equal rows give equal problems, and each mistake is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.sets import read_set
from megatron_rl.errors import UserError

ROWS = [{"question": f"How many {{clips}} of {n}?", "answer": f"so\n#### 1,07{n}", "note": "x"} for n in range(3)]
GOOD = json.dumps(ROWS[0]).encode()


ZSTD = pyarrow.compress(b"question\nq\n", "zstd", asbytes=True)


def write(folder: Path, content: bytes, name: str = "train.jsonl") -> Path:
    path = folder / "gsm8k" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def read(path: Path, format: str | None = "gsm8k", name: str = ""):
    return read_set(DataSourceConfig(source=str(path), name=name), DataConfig(format=format), "data.train").problems


def test_a_row_becomes_a_problem(tmp_path):
    [problem] = read(write(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n\n"))
    assert (problem.prompt, problem.answer) == ("How many {clips} of 0?", "1070")
    assert (problem.id, problem.source, problem.level) == ("gsm8k/train:1", "gsm8k/train", 0)
    named = DataSourceConfig(source=str(tmp_path / "gsm8k" / "train.jsonl"), name="sums", format="gsm8k")
    [problem] = read_set(named, DataConfig(format="math"), "data.eval").problems
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
    for name, wrong in (("absent.jsonl", "does not exist"), ("*.jsonl", "matches no file"), (".", "is a folder without data files")):
        with pytest.raises(UserError, match=f"data.train = .*{wrong}"):
            read(tmp_path / name)
    with pytest.raises(UserError, match=r"a.parquet': is not a readable Parquet file \(Parquet magic bytes not found"):
        read(write(tmp_path, GOOD * 9, "a.parquet"))
    for name, content in (("a.jsonl", b"\n \n"), ("a.json", b"[]"), ("a.json", b"")):
        with pytest.raises(UserError, match="contains no problems"):
            read(write(tmp_path, content, name))


@pytest.mark.parametrize("name, content", [("a.csv", b"question\nq\n"), ("a.xlsx", b"PK\x03\x04"), ("a.csv.zst", ZSTD)])
def test_a_file_of_another_format_is_refused_as_a_whole_and_not_by_its_first_row(tmp_path, name, content):
    with pytest.raises(UserError, match=f"data.train = '.*{name}': is neither JSON nor Parquet; use a JSONL, JSON or Parquet file"):
        read(write(tmp_path, content, name))


def test_rows_without_a_gold_answer_are_left_out(tmp_path):
    rows = [ROWS[0], {"question": "q", "answer": None}, {"question": "q", "answer": " "}, {"question": "q", "answer": "12 ####"}, ROWS[1]]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)).encode())
    found = read_set(DataSourceConfig(source=str(path)), DataConfig(format="gsm8k"), "data.train")
    assert (len(found.problems), found.unanswered) == (2, [2, 3, 4])
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


def compress(content: bytes, name: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, name) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix, codec", [("gz", "gzip"), ("zst", "zstd")])
def test_compressed_files_are_read_and_broken_ones_refused(tmp_path, suffix, codec):
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    whole = compress(lines, codec)
    expected = read(write(tmp_path, lines), name="set")
    assert read(write(tmp_path, whole, f"train.jsonl.{suffix}"), name="set") == expected
    assert read(write(tmp_path, compress(lines, codec) + compress(b"\n" + GOOD, codec), f"two.jsonl.{suffix}"), name="set")[:3] == expected
    assert read(write(tmp_path, compress(json.dumps(ROWS).encode(), codec), f"train.json.{suffix}"), name="set") == expected
    assert read(write(tmp_path, whole, f"train.jsonl.{suffix}"))[0].source == "gsm8k/train"
    for broken in (whole[:-9], b"no", lines):
        with pytest.raises(UserError, match=f"data.train = '.*train.jsonl.{suffix}': cannot be read "):
            read(write(tmp_path, broken, f"train.jsonl.{suffix}"))
    with pytest.raises(UserError, match=f"train.jsonl.{suffix}:1': is not JSON|train.jsonl:1': is not JSON"):
        read(write(tmp_path, compress(b"{", codec), f"train.jsonl.{suffix}"))


def test_folders_and_patterns_of_shards(tmp_path):
    folder = tmp_path / "gsm8k"
    folder.mkdir()

    def shard(name: str, *numbers: int) -> None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[number] for number in numbers]), folder / name)

    shard("train-00000-of-00002.parquet", 0, 1)
    with pytest.raises(UserError, match="gsm8k': is a folder with 1 of 2 shards; complete it, or write a pattern"):
        read(folder)
    shard("train-00001-of-00002.parquet", 2)
    (folder / "README.md").write_text("# Data")
    (folder / ".hidden.parquet").write_text("")
    problems = read(folder)
    assert [problem.answer for problem in problems] == ["1070", "1071", "1072"]
    assert [problem.id.rpartition(":")[2] for problem in problems] == ["1", "2", "3"]
    shard("test-00000-of-00001.parquet", 0)
    with pytest.raises(
        UserError, match=r"gsm8k': is a folder with files of 2 sets \(test.parquet, train.parquet\); name one file, or a patter"
    ):
        read(folder)
    assert [problem.answer for problem in read(folder / "train-*.parquet")] == ["1070", "1071", "1072"]
    assert [problem.answer for problem in read(folder / "t*-0000[0-1]-of-0000?.parquet")] == ["1070", "1070", "1071", "1072"]
