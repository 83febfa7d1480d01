"""JSONL files: the published GSM8K shape, and one clear line for every fault."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.data.jsonl import read_jsonl
from megatron_rl.errors import UserError

GOOD = json.dumps({"question": "How many {clips}?", "answer": "48/2 = <<48/2=24>>24\n#### 1,072"}).encode()


def _write(folder: Path, content: bytes) -> Path:
    path = folder / "gsm8k" / "train.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_a_row_becomes_a_problem(tmp_path):
    [problem] = read_jsonl(_write(tmp_path, b"\xef\xbb\xbf" + GOOD + b"\r\n\n"), "gsm8k", "data.train")
    assert (problem.prompt, problem.answer) == ("How many {clips}?", "1072")
    assert (problem.id, problem.source) == ("gsm8k/train:1", "gsm8k/train")


@pytest.mark.parametrize("gold, expected", [("-1,234,567", "-1234567"), ("1,080.5", "1080.5"), ("12", "12"), ("(1,234)", "(1,234)")])
def test_only_thousands_separators_are_removed(tmp_path, gold, expected):
    line = json.dumps({"question": "q", "answer": f"#### {gold}"}).encode()
    assert read_jsonl(_write(tmp_path, line), "gsm8k", "data.train")[0].answer == expected


def test_the_arithmetic_shape_ends_in_one_hash(tmp_path):
    line = json.dumps({"question": "57+8-3=", "answer": "57+8=65,65-3=62#62"}).encode()
    assert read_jsonl(_write(tmp_path, line), "arithmetic", "data.train")[0].answer == "62"


@pytest.mark.parametrize(
    "line, wrong",
    [
        (b'{"question": "q"', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "must be a JSON object, not list"),
        (b'{"question": "q"}', "the field answer is missing"),
        (b'{"answer": "#### 1"}', "the field question is missing"),
        (b'{"question": 5, "answer": "#### 1"}', "the field question must be a string, not int"),
        (b'{"question": "q", "answer": null}', "the field answer must be a string, not NoneType"),
        (b'{"question": " ", "answer": "#### 1"}', "the field question is empty"),
        (b'{"question": "q", "answer": "12"}', "has no ####"),
        (b'{"question": "q", "answer": "12 #### "}', "the gold answer after #### is empty"),
        (b'{"question": "\xff", "answer": "#### 1"}', "is not UTF-8"),
        (b'{"question": "\\ud800", "answer": "#### 1"}', "lone surrogate"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, wrong):
    path = _write(tmp_path, GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError) as caught:
        read_jsonl(path, "gsm8k", "data.train")
    message = str(caught.value)
    assert message.startswith(f"data.train = '{path}:3': ") and wrong in message and "\n" not in message


@pytest.mark.parametrize("name, wrong", [("absent.jsonl", "does not exist"), (".", "is a folder")])
def test_an_unreadable_file_is_named(tmp_path, name, wrong):
    with pytest.raises(UserError, match=f"data.eval = .*{wrong}"):
        read_jsonl(tmp_path / name, "gsm8k", "data.eval")


def test_a_file_without_problems_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no problems"):
        read_jsonl(_write(tmp_path, b"\n \n"), "gsm8k", "data.train")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.text().map(str.encode) | st.dictionaries(st.text(), st.text()).map(json.dumps).map(str.encode))
def test_no_content_escapes_as_another_error(tmp_path, content):
    with pytest.raises(UserError):  # no such content has both fields, so it is always refused, and always politely
        read_jsonl(_write(tmp_path, content), "gsm8k", "data.train")
