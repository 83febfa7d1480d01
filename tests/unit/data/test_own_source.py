"""Sources of the user's own: a generator and rows, and what is refused before a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_rl.config import Config, ModelConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.data import check_data, load_problems
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


def count_bytes(prompts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
    return {"input_ids": [list(prompt.encode()) for prompt in prompts]}


def load(**data: object):
    return load_problems(Config(model=ModelConfig(path=Path("m")), data=DataConfig(**data)), count_bytes)


def test_a_generator_gives_problems_that_no_other_set_holds_out_and_that_are_short_enough():
    held_out = [{"source": "own_sources:Doubles", "settings": {"largest": 3}, "name": "small"}]
    stream, problems = load(train="own_sources:Doubles", eval=held_out, settings={"largest": 50}, eval_size=4, max_prompt_tokens=4)
    assert [(problem.prompt, problem.source) for problem in problems] == [(f"2*{number}?", "small") for number in (3, 4, 5, 6)]
    drawn = stream.next_batch(50)
    assert {problem.prompt for problem in drawn} == {f"2*{number}?" for number in (0, 1, 2, 7, 8, 9)}
    assert {problem.source for problem in drawn} == {"doubles"}


def test_settings_and_seed_are_part_of_what_a_resumed_run_must_share():
    state = load(train="own_sources:Doubles", settings={"largest": 9})[0].state_dict()
    load(train="own_sources:Doubles", settings={"largest": 9})[0].load_state_dict(state)
    for other in ({"settings": {"largest": 8}}, {"settings": {"largest": 9}, "seed": 1}):
        with pytest.raises(UserError, match="other problems or in another order"):
            load(train="own_sources:Doubles", **other)[0].load_state_dict(state)


def test_rows_of_a_function_are_a_set_like_any_other():
    stream, held_out = load(
        train=[{"source": "own_sources:rows", "settings": {"count": 5}, "name": "five"}],
        eval=[{"source": "own_sources:rows", "settings": {"count": 2}, "name": "two"}],
        format="gsm8k",
    )
    assert [(problem.id, problem.answer) for problem in held_out] == [("two:1", "0"), ("two:2", "1")]
    assert sorted(problem.id for problem in stream.next_batch(3)) == ["five:3", "five:4", "five:5"]


@pytest.mark.parametrize(
    "data, line",
    [
        ({"train": "own_sources:absent"}, "data.train = 'own_sources:absent': cannot be imported (AttributeError"),
        ({"train": "own_sources:number", "format": "gsm8k"}, "data.train = 'own_sources:number': cannot be made with the settings {}"),
        ({"train": "own_sources:Unidentified"}, "data.train = 'own_sources:Unidentified': fails (AttributeError: "),
        (
            {"train": "own_sources:Numbers"},
            "data.train = 'own_sources:Numbers': fails (TypeError: fingerprint must be a tuple; id, prompt and",
        ),
        ({"train": "own_sources:Doubles", "eval": "own_sources:Few"}, "data.eval = 'own_sources:Few': fails (IndexError: "),
        (
            {"train": "own_sources:Doubles", "settings": {"lagest": 3}},
            "data.train = 'own_sources:Doubles': cannot be made with the settings {'lagest': 3} (TypeError: ",
        ),
        (
            {"train": "own_sources:ends_early", "format": "gsm8k"},
            "data.train = 'own_sources:ends_early': fails after 1 rows (OSError: no disk)",
        ),
        ({"train": "own_sources:rows", "settings": {"count": 1}}, "data.train = 'own_sources:rows:1': needs a format; its fields are"),
        (
            {"train": "own_sources:rows", "format": "own_sources:rows", "settings": {"count": 1}},
            "data.train = 'own_sources:rows:1': format",
        ),
        ({"train": "own_sources:rows", "format": "own_sources:nothing"}, "data.format = 'own_sources:nothing': cannot be imported"),
        ({"train": "", "eval": ""}, "data.train: names no problems; give a JSONL, JSON or Parquet file, hf:OWNER/NAME:SPLIT for one on"),
    ],
)
def test_what_cannot_be_used_is_one_line_before_a_run(tmp_path, data, line):
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        check_data(DataConfig(**data), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_path_and_a_name_on_the_hub_are_no_modules():
    data = DataConfig(train=[{"source": "hf:gsm8k", "name": "a"}, {"source": "data/train.jsonl"}])
    assert [load_generator(source, data, "data.train") for source in data.train] == [None, None]
    assert [source.is_own for source in data.train] == [False, False]
