"""Custom sources: generators and functions of rows, and what is refused before a run."""

from __future__ import annotations

import re

import pytest
from support.data import load

from megatron_rl.config.data import DataConfig
from megatron_rl.data import check_data
from megatron_rl.data.own_source import load_generator
from megatron_rl.errors import UserError

MODULE = """
from megatron_rl.types import Problem

class Doubles:
    def __init__(self, seed, largest=100):
        self.seed, self.largest, self.fingerprint = seed, largest, (seed, largest)
    def problem(self, number):
        return Problem(f"double:{number}", f"2*{number}?", str(2 * number))
    def train_problem(self, position, accept):
        candidates = (self.problem((position * 7 + self.seed + step) % self.largest) for step in range(self.largest))
        return next(problem for problem in candidates if accept(problem))
    def held_out(self, count):
        return [self.problem(self.largest + number) for number in range(count)]

class Unidentified(Doubles):
    def __init__(self, seed): pass

class Numbers(Doubles):
    def problem(self, number):
        return Problem(f"{number}", "1?", number)

class Few(Doubles):
    def held_out(self, count):
        return [[self.problem(0)][number] for number in range(count)]

def rows(count):
    for number in range(count):
        yield {"question": f"{number}?", "answer": f"#### {number}"}

def ends_early():
    yield {"question": "1?", "answer": "#### 1"}
    raise OSError("no disk")

number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_sources.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_generator_gives_short_problems_that_are_not_held_out():
    held_out = [{"source": "own_sources:Doubles", "settings": {"largest": 3}, "name": "small"}]
    stream, problems = load(train="own_sources:Doubles", eval=held_out, settings={"largest": 50}, eval_size=4, max_prompt_tokens=4)
    assert [(problem.prompt, problem.source) for problem in problems] == [(f"2*{number}?", "small") for number in (3, 4, 5, 6)]
    drawn = stream.next_batch(50)
    assert {problem.prompt for problem in drawn} == {f"2*{number}?" for number in (0, 1, 2, 7, 8, 9)}
    assert {problem.source for problem in drawn} == {"doubles"}


def test_a_run_cannot_be_resumed_with_other_settings_or_seed():
    state = load(train="own_sources:Doubles", settings={"largest": 9})[0].state_dict()
    load(train="own_sources:Doubles", settings={"largest": 9})[0].load_state_dict(state)
    for other in ({"settings": {"largest": 8}}, {"settings": {"largest": 9}, "seed": 1}):
        with pytest.raises(UserError, match="other problems or in another order"):
            load(train="own_sources:Doubles", **other)[0].load_state_dict(state)


def test_rows_of_a_function_are_read_like_those_of_a_file():
    stream, held_out = load(
        train=[{"source": "own_sources:rows", "settings": {"count": 5}, "name": "five"}],
        eval=[{"source": "own_sources:rows", "settings": {"count": 2}, "name": "two"}],
        format="gsm8k",
        max_left_out=0.4,
    )
    assert [(problem.id, problem.answer) for problem in held_out] == [("two:1", "0"), ("two:2", "1")]
    assert sorted(problem.id for problem in stream.next_batch(3)) == ["five:3", "five:4", "five:5"]


@pytest.mark.parametrize(
    "field, train, data, line",
    [
        ("data.train", "own_sources:absent", {}, "cannot be imported (AttributeError"),
        ("data.train", "own_sources:number", {}, "cannot be called with the settings {}"),
        ("data.train", "own_sources:Unidentified", {}, "fails (AttributeError: "),
        ("data.train", "own_sources:Numbers", {}, "fails (TypeError: id, prompt and answer of a problem must be strings"),
        ("data.eval", "own_sources:Doubles", {"eval": "own_sources:Few"}, "fails (IndexError: "),
        ("data.train", "own_sources:Doubles", {"settings": {"lagest": 3}}, "cannot be called with the settings {'lagest': 3} (TypeError: "),
        ("data.train", "own_sources:ends_early", {}, "fails after 1 rows (OSError: no disk)"),
        ("data.train", "own_sources:rows", {"settings": {"count": 1}, "format": None}, "needs a format; its fields are"),
        ("data.train", "own_sources:rows", {"settings": {"count": 1}, "format": "own_sources:rows"}, "format own_sources:rows fails ("),
        ("data.format", "own_sources:rows", {"format": "own_sources:nothing"}, "cannot be imported"),
        ("data.train", "", {}, "is required for training; use a JSONL, JSON or Parquet file, a hub data set as hf:OWNER/NAME:SPLIT"),
    ],
)
def test_each_mistake_is_one_line(model, field, train, data, line):
    with pytest.raises(UserError, match=f"^{re.escape(field)}.*: {re.escape(line)}") as caught:
        check_data(DataConfig(**{"train": train, "format": "gsm8k", **data}), model)
    assert "\n" not in str(caught.value)


def test_paths_and_hub_names_are_not_custom_sources():
    data = DataConfig(train=[{"source": "hf:gsm8k", "name": "a"}, {"source": "data/train.jsonl"}])
    assert [load_generator(source, data, "data.train") for source in data.train] == [None, None]
    assert [source.is_own for source in data.train] == [False, False]
