"""Columns of rows: typed and shared, from every kind of source to every kind of judge, and what they cost."""

import copy
import datetime
import json
import pickle
import tracemalloc
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from support import data as support

from megatron_rl.config.data import ColumnsConfig
from megatron_rl.data.columns import JsonRows, RowColumns
from megatron_rl.data.formats import RowError
from megatron_rl.data.sets import read_columns, read_set
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

ROWS = [
    {"q": f"{n}?", "a": n, "extra": {"board": [[n, 1], [2, 3]], "hint": None if n else "x"}, "rate": n / 4, "tags": ["a"]} for n in range(3)
]


def read(source: str, **data: object) -> list[Problem]:
    config = support.make_config(train=source, columns={"question": "q", "answer": "a"}, **data).data
    return read_set(config.train[0], config, "data.train").problems


@pytest.fixture
def sources(tmp_path, monkeypatch, write):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "own_rows.py").write_text(f"def rows(): return iter({ROWS})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "train.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes())
    return [write(*ROWS), str(tmp_path / "rows.parquet"), str(tmp_path / "rows.json"), "own_rows:rows", f"hf:{clone}:train"]


def test_every_source_keeps_typed_columns(sources):
    for source in sources:
        problems = read(source)
        assert [dict(problem.columns) for problem in problems] == ROWS, source
        assert [problem.answer for problem in problems] == ["0", "1", "2"]
        for copied in (pickle.loads(pickle.dumps(problems[1])), copy.deepcopy(problems[1])):
            assert copied == problems[1] and isinstance(copied.columns, dict)
        assert json.loads(json.dumps(problems[2].to_json()))["columns"] == ROWS[2]
        assert [dict(problem.columns) for problem in read(source, keep_columns=("extra", "tags"))] == [
            {"extra": row["extra"], "tags": row["tags"]} for row in ROWS
        ]
        assert hash(problems[0]) == hash(read(source)[0])


def test_columns_become_json_values():
    columns = {
        "when": datetime.date(2026, 1, 2),
        "exact": Decimal("1.50"),
        "raw": b"ab",
        "nan": float("nan"),
        "deep": ({"x": float("inf")},),
    }
    shown = Problem("p", "q", "a", columns=columns).to_json()["columns"]
    assert shown == {"when": "2026-01-02", "exact": "1.50", "raw": "YWI=", "nan": None, "deep": [{"x": None}]}
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        Problem("p", "q", "a", columns={"x": object()}).to_json()


def test_columns_that_are_not_data_are_refused(tmp_path, monkeypatch):
    (tmp_path / "own_objects.py").write_text("def rows(): yield {'q': '1?', 'a': '1', 'image': object()}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError, match=r"own_objects:rows:1': has a column that is not data \(\w+: object cannot .*leave it out by data.keep_col"
    ):
        read("own_objects:rows")
    assert read("own_objects:rows", keep_columns=())[0].columns == {}


def test_a_row_costs_less_than_a_dict():
    """Text and 8 bytes in one buffer, and one reference."""
    tracemalloc.start()
    rows = JsonRows()
    kept: list[RowColumns] = [rows.append({"question": f"How many {n}?", "answer": n, "note": "x" * 20}) for n in range(20_000)]
    size = tracemalloc.get_traced_memory()[0] / len(kept)
    tracemalloc.stop()
    text = len(json.dumps(dict(kept[-1])))
    assert size < 1.2 * text + 8 + 80 + 16, size
    assert kept[7]["answer"] == 7 and len(kept[7]) == 3 and "absent" not in kept[7]


@pytest.mark.parametrize(
    "value, gold",
    [
        (72, "72"),
        (72.0, "72"),
        (-0.0, "0"),
        (1e22, "10000000000000000000000"),
        (0.1, "0.1"),
        (1.5e-7, "0.00000015"),
        (2.5e-10, "0.00000000025"),
        (123456789.125, "123456789.125"),
        (Decimal("1.50"), "1.5"),
        (Decimal("72.00"), "72"),
        ("72.0", "72.0"),
        ({"target": ["a", 1]}, '{"target": ["a", 1]}'),
        (["a", "ü"], '["a", "ü"]'),
    ],
)
def test_a_gold_answer_is_read_as_written(value, gold):
    assert read_columns(ColumnsConfig(question="q", answer="a"), {"q": "?", "a": value}).gold == gold


@pytest.mark.parametrize(
    "value, line",
    [
        (float("nan"), "the field a must be a finite number, not nan; correct or remove this row"),
        (float("-inf"), "the field a must be a finite number, not -inf; "),
        (True, "the field a must be a string, not bool; "),
        ([float("nan")], "the field a must hold JSON values (Out of range float values"),
        ([object()], "the field a must hold JSON values (object cannot be written"),
        (["\ud800"], "the field a contains a lone surrogate"),
    ],
)
def test_a_gold_answer_that_cannot_be_read_is_refused(value, line):
    with pytest.raises(RowError) as caught:
        read_columns(ColumnsConfig(question="q", answer="a"), {"q": "?", "a": value})
    assert f"{caught.value.rule}; {caught.value.fix}".startswith(line)


def test_numbers_of_a_file_keep_their_digits(tmp_path):
    texts = ["3.14159265358979323846", "1e-400", "12345678901234567890.5", "6.02E23", "72.0", "0.30000000000000004"]
    golds = ["3.14159265358979323846", f"0.{'0' * 399}1", "12345678901234567890.5", "602000000000000000000000", "72", "0.30000000000000004"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"q": "?", "a": {text}}}\n' for text in texts))
    assert [problem.answer for problem in read(str(tmp_path / "a.jsonl"))] == golds
    for text in ("NaN", "Infinity", "-Infinity", "1e400", "1e999999999", "1e-999999999", "1e99999999999999999999"):
        (tmp_path / "b.jsonl").write_text(f'{{"q": "?", "a": 1}}\n{{"q": "?", "a": {text}}}\n')
        with pytest.raises(UserError, match=r"b.jsonl:2': the field a must be a finite number, not (nan|inf|-inf|1e)"):
            read(str(tmp_path / "b.jsonl"))


@pytest.mark.parametrize(
    "column, golds",
    [
        (pyarrow.array([72.0, None]), ["72"]),
        (pyarrow.array([0.1, 3e-7, 16777216.0, None], pyarrow.float32()), ["0.1", "0.0000003", "16777216"]),
        (pyarrow.array([0.1, 1e-300, 1e22]), ["0.1", f"0.{'0' * 299}1", "1" + "0" * 22]),
        (pyarrow.array([2**63 - 1, -5]), ["9223372036854775807", "-5"]),
        (pyarrow.array([2**64 - 1], pyarrow.uint64()), ["18446744073709551615"]),
        (pyarrow.array([Decimal("0.10"), Decimal("72.00")]), ["0.1", "72"]),
        (pyarrow.array(["1e-05", "NaN", "0.10"]), ["1e-05", "NaN", "0.10"]),
        (pyarrow.array(["7", "8"]).dictionary_encode(), ["7", "8"]),
        (pyarrow.array([0.1, None], pyarrow.float16()), ["0.1"]),
        (pyarrow.array([0.1, 0.2], pyarrow.float32()).dictionary_encode(), ["0.1", "0.2"]),
        (pyarrow.array([{"b": [0.1], "c": None}], pyarrow.struct({"b": pyarrow.list_(pyarrow.float32()), "c": pyarrow.float32()})),
         ['{"b": [0.1], "c": null}']),
    ],
)  # fmt: skip
def test_numbers_of_a_parquet_column(tmp_path, column, golds):
    """pandas turns an integer column with a null into floats."""
    pyarrow.parquet.write_table(pyarrow.table({"q": [f"{n}?" for n in range(len(column))], "a": column}), tmp_path / "a.parquet")
    assert [problem.answer for problem in read(str(tmp_path / "a.parquet"))] == golds


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("type", [pyarrow.float32(), pyarrow.float64()])
def test_a_parquet_column_without_a_number_is_refused(tmp_path, value, type):
    pyarrow.parquet.write_table(pyarrow.table({"q": ["1?", "2?"], "a": pyarrow.array([1.5, value], type)}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=f"a.parquet:2': the field a must be a finite number, not {value}"):
        read(str(tmp_path / "a.parquet"))


def test_rows_of_verl(write):
    row = {
        "data_source": "d",
        "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "1?"}],
        "extra_info": {"index": 1},
    }
    golds = ("2", 2, 2.0, {"target": ["2"]}, ["2"])
    path = write(*({**row, "reward_model": {"style": "rule", "ground_truth": gold}} for gold in golds))
    data = support.make_config(train=path, format="verl", chat=True).data
    problems = read_set(data.train[0], data, "data.train").problems
    assert [problem.answer for problem in problems] == ["2", "2", "2", '{"target": ["2"]}', '["2"]']
    assert [problem.columns["reward_model"]["ground_truth"] for problem in problems] == list(golds)
    assert problems[0].prompt == "1?" and problems[0].history == ({"role": "system", "content": "S"},)
    data = support.make_config(train=write(row), format="verl", chat=True).data
    with pytest.raises(UserError, match="format verl needs the field reward_model.ground_truth, found data_source, prompt, extra_info"):
        read_set(data.train[0], data, "data.train")
