"""Columns of unusual types reach workers and logs as they are, or are refused by name when the data is read."""

import datetime
import json
import zoneinfo
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.sets import read_set
from megatron_rl.errors import UserError
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.types import as_json
from megatron_rl.workers import plain

NS = 1_700_000_000_123_456_000
TIME = datetime.datetime(2023, 11, 14, 22, 13, 20, 123456)
MICROSECOND = datetime.timedelta(microseconds=1)
READ = {
    "ns": (pa.array([NS], pa.timestamp("ns")), TIME),
    "ns of a zone": (pa.array([NS], pa.timestamp("ns", "Asia/Shanghai")), TIME.replace(tzinfo=datetime.UTC)),
    "ns in a struct": (pa.array([{"a": NS, "b": None}], pa.struct([("a", pa.timestamp("ns")), ("b", pa.null())])), {"a": TIME, "b": None}),
    "ns in lists": (pa.array([[[NS]]], pa.list_(pa.large_list(pa.timestamp("ns")))), [[TIME]]),
    "ns in a pair": (pa.array([[NS, None]], pa.list_(pa.timestamp("ns"), 2)), [TIME, None]),
    "ns in a map": (pa.array([[(1, NS)]], pa.map_(pa.int64(), pa.timestamp("ns"))), [(1, TIME)]),
    "ns as categories": (pa.array([NS], pa.timestamp("ns")).dictionary_encode(), TIME),
    "time": (pa.array([1000], pa.time64("ns")), datetime.time(0, 0, 0, 1)),
    "duration": (pa.array([1000], pa.duration("ns")), MICROSECOND),
    "date": (pa.array([19675], pa.date32()), datetime.date(2023, 11, 14)),
    "decimal": (pa.array([Decimal("1.10")]), Decimal("1.10")),
    "bytes": (pa.array([b"\xff\0"]), b"\xff\0"),
    "category": (pa.array(["字"]).dictionary_encode(), "字"),
    "map": (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())), [("k", 1)]),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "half": (pa.array(np.array([0.5], np.float16)), 0.5),
    "null": (pa.nulls(1), None),
    "nan": (pa.array([float("-inf")]), float("-inf")),
    "empty": (pa.array([[]], pa.list_(pa.struct([("a", pa.string())]))), []),
}
REFUSED = {
    "ns that count": (pa.array([NS + 1], pa.timestamp("ns")), "would lose data"),
    "time that counts": (pa.array([1], pa.time64("ns")), "would lose data"),
    "duration that counts": (pa.array([[1]], pa.list_(pa.duration("ns"))), "would lose data"),
    "year 33,000": (pa.array([10**12], pa.timestamp("s")), "year 33658 is out of range|int too large|out of range"),
    "long ago": (pa.array([-(10**8)], pa.date32()), "out of range"),
    "long": (pa.array([2**62], pa.duration("s")), "too large|out of range"),
    "no text": (pa.array([b"\xff"]).view(pa.string()), "can't decode byte"),
    "twins": (pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), "duplicate field names"),
}


def write(folder, columns):
    names, arrays = zip(*{"question": pa.array(["1+1"]), "answer": pa.array(["#### 2"]), **columns}.items(), strict=True)
    pyarrow.parquet.write_table(pa.table(list(arrays), list(names)), folder / "a.parquet")
    return DataSourceConfig(source=str(folder / "a.parquet")), DataConfig(format="gsm8k"), "data.train"


def test_odd_columns_reach_workers_and_logs_as_they_are(tmp_path):
    (problem,) = read_set(*write(tmp_path, {name: column for name, (column, _) in READ.items()})).problems
    for name, (_, value) in READ.items():
        assert problem.columns[name] == value and type(problem.columns[name]) is type(value), name
    assert plain.load(plain.dump(dict(problem.columns))) == dict(problem.columns)
    json.dumps(as_json(problem.columns), allow_nan=False)
    assert problem.columns["ns of a zone"].tzinfo == zoneinfo.ZoneInfo("Asia/Shanghai")


def test_a_reward_function_gets_odd_columns(tmp_path, monkeypatch):
    (tmp_path / "own_judge.py").write_text(
        "def judge(text, problem):\n    return float(problem.columns[text] is not None)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (problem,) = read_set(*write(tmp_path, {name: column for name, (column, _) in READ.items()})).problems
    with RewardPool([("own_judge:judge", {})], 1, 60, 4096) as pool:
        verdicts = [verdict for (verdict,) in pool.score(list(READ), [problem] * len(READ))]
    assert [(verdict.value, verdict.error) for verdict in verdicts] == [(float(value is not None), "") for _, value in READ.values()]


@pytest.mark.parametrize("name", REFUSED)
def test_what_python_cannot_hold_is_refused_by_column(tmp_path, name):
    column, reason = REFUSED[name]
    with pytest.raises(UserError, match=f"column {name} holds values that cannot be read without loss .*({reason}).*; convert the col"):
        read_set(*write(tmp_path, {name: column}))


def test_of_two_columns_with_one_name_none_wins(tmp_path):
    table = pa.table([pa.array(["1+1"]), pa.array(["#### 2"]), pa.array(["#### 3"])], ["question", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    source = DataSourceConfig(source=str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match="has several columns named answer; rename all but one of them"):
        read_set(source, DataConfig(format="gsm8k"), "data.train")


@pytest.mark.parametrize("row", ['{"question": "1", "answer": "#### 2", "answer": "#### 3"}', '{"x": [{"answer": 1, "answer": 1}]}'])
def test_of_two_fields_with_one_name_none_wins(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(row, encoding="utf-8")
    (tmp_path / "a.json").write_text(f"[{row}]", encoding="utf-8")
    for name, place in {"a.jsonl": "a.jsonl:1", "a.json": "a.json"}.items():
        with pytest.raises(UserError, match=f"{place}': has the field answer twice"):
            read_set(DataSourceConfig(source=str(tmp_path / name)), DataConfig(format="gsm8k"), "data.train")


def test_mixed_types_in_one_column_of_json_are_kept(tmp_path):
    values = [1, "1", 1.5, None, True, [1, "a"], {"a": []}, float("nan"), 10**30, "\ud800"]
    rows = [{"question": f"{number}+1", "answer": "#### 2", "note": value} for number, value in enumerate(values)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, rows)), encoding="utf-8")
    problems = read_set(DataSourceConfig(source=str(tmp_path / "a.jsonl")), DataConfig(format="gsm8k"), "data.train").problems
    for problem, value in zip(problems, values, strict=True):
        arrived = plain.load(plain.dump(dict(problem.columns)))["note"]
        assert repr(arrived) == repr(value)


def test_a_data_frame_of_pandas_is_a_source(tmp_path, monkeypatch):
    lines = (
        "import pandas", "def rows(stamp):",
        "    time = pandas.Timestamp(stamp) if stamp else pandas.NaT",
        "    yield {'question': '1+1', 'answer': '#### 2', 'day': {'at': time}}",
    )  # fmt: skip
    (tmp_path / "own_frame.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def read(stamp):
        source = DataSourceConfig(source="own_frame:rows", settings={"stamp": stamp})
        return read_set(source, DataConfig(format="gsm8k"), "data.train").problems

    assert plain.load(plain.dump(dict(read(NS)[0].columns)))["day"] == {"at": TIME}
    for stamp in (NS + 1, 0):
        with pytest.raises(UserError, match=r"own_frame:rows:1': has a column that is not data \(day: .*; leave it out"):
            read(stamp)


def test_times_of_a_hub_data_set_are_read_without_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, {name: READ[name][0] for name in ("ns", "ns in a struct", "time", "duration")})
    source = DataSourceConfig(source=f"hf:{folder}:train")
    (problem,) = read_set(source, DataConfig(format="gsm8k"), "data.train").problems
    assert problem.columns["ns"] == TIME and type(problem.columns["ns"]) is datetime.datetime
    assert problem.columns["duration"] == MICROSECOND and plain.load(plain.dump(dict(problem.columns))) == dict(problem.columns)
    write(folder, {"late": REFUSED["ns that count"][0]})
    with pytest.raises(UserError, match="column late holds values that cannot be read without loss"):
        read_set(source, DataConfig(format="gsm8k"), "data.train")
