"""load_problems: held-out problems, dropped problems, an order that resumes exactly, and custom sources."""

import json
import logging
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from support.processes import call_in_fresh_process

from megatron_rl.config import Config, ModelConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.data import check_data, load_held_out, load_problems
from megatron_rl.data.loading import normalize_question
from megatron_rl.data.own_source import load_generator
from megatron_rl.errors import UserError

SUMS = "examples.arithmetic.task:Arithmetic"
REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"
HUB_CARD = (
    "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n  - {split: test, path: main/test-*}\n---\n"
)


def count_bytes(prompts, add_special_tokens):
    """Tokenize without a library."""
    return {"input_ids": [list(prompt.encode()) for prompt in prompts]}


def make_config(**data):
    return Config(model=ModelConfig(path=Path("m")), data=DataConfig.model_validate({"train": SUMS, "eval": SUMS, **data}))


def load(**data):
    return load_problems(make_config(**data), count_bytes)


@pytest.fixture
def jsonl(write):
    return lambda name, questions: write(*({"question": q, "answer": f"#### {i}"} for i, q in enumerate(questions)), name=f"{name}.jsonl")


def test_held_out_problems_are_read_without_training_data():
    config = make_config(train="gone.jsonl", eval=SUMS, eval_size=7)
    assert load_held_out(config, count_bytes) == load(eval_size=7)[1]


def test_training_problems_are_dropped_if_any_row_of_the_eval_file_has_them(jsonl, caplog):
    """This includes other spellings, and rows whose prompts are too long."""
    long = "long" * 9
    train, held_out = jsonl("train", ["a", "How  many\nc?", "c", "d", long]), jsonl("eval", ["how many c? ", "x", "d", long])
    with caplog.at_level(logging.WARNING):
        stream, problems = load(train=train, eval=held_out, format="gsm8k", eval_size=1, max_prompt_tokens=20)
    assert len(problems) == 1 and problems[0].prompt in {"how many c? ", "x", "d"}
    assert {problem.prompt for problem in stream.next_batch(20)} == {"a", "c"}
    assert "dropped 3 problems" in caplog.text


def test_generated_train_avoids_an_eval_file(jsonl):
    seen = {problem.prompt for problem in load(eval="", settings={"levels": [1]})[0].next_batch(300)}
    stream, _ = load(eval=jsonl("eval", sorted(seen)), format="gsm8k", settings={"levels": [1]})
    assert not {problem.prompt for problem in stream.next_batch(300)} & seen


def test_long_prompts_are_dropped(jsonl, caplog):
    train, held_out = jsonl("train", ["short", "long" * 10, "tiny"]), jsonl("eval", ["s", "l" * 99])
    with caplog.at_level(logging.WARNING):
        stream, problems = load(train=train, eval=held_out, format="gsm8k", max_prompt_tokens=8)
    assert {problem.prompt for problem in stream.next_batch(10)} == {"short", "tiny"}
    assert [problem.prompt for problem in problems] == ["s"]
    for counts in ("1 of 3", "1 of 2"):
        assert f": dropped {counts} problems with prompts over 8" in caplog.text
    assert "fewer than data.eval_size" in caplog.text


def test_sets_without_remaining_problems_are_refused(jsonl):
    train = jsonl("train", ["question one", "question two"])
    with pytest.raises(UserError, match=r"data.max_prompt_tokens = 3: all 2 prompts of data.train \("):
        load(train=train, eval="", format="gsm8k", max_prompt_tokens=3)
    with pytest.raises(UserError, match=r"data.max_prompt_tokens = 3: all 128 prompts of data.eval \(arithmetic\)"):
        load(max_prompt_tokens=3)
    with pytest.raises(UserError, match="data.settings.levels = .*level 5"):
        load(eval="", settings={"levels": [5, 6]}, max_prompt_tokens=12)
    with pytest.raises(UserError, match="data.train = .*also in data.eval"):
        load(train=train, eval=train, format="gsm8k")
    again = jsonl("again", ["question two"])
    with pytest.raises(UserError, match="data.train = .*again.jsonl': all of its problems are in an earlier set; remove it"):
        load(train=[{"source": train}, {"source": again}], format="gsm8k")


def test_repeated_questions_are_dropped(jsonl, caplog):
    first, second = jsonl("first", ["a", "b", "A "]), jsonl("second", ["b", "c", "a", "d"])
    held_out = jsonl("eval", ["x", "y", "X"])
    stream, problems = load(train=[{"source": first}, {"source": second}], eval=held_out, format="gsm8k")
    assert [problem.prompt for problem in problems] == ["x", "y"]
    assert sorted(problem.prompt for problem in stream.next_batch(4)) == ["a", "b", "c", "d"]
    for count, name in ((1, "first"), (2, "second"), (1, "eval")):
        assert re.search(rf"/{name}\): dropped {count} problems with repeated questions", caplog.text)


def test_a_mixture_of_generated_and_published_problems(jsonl):
    train = [{"source": SUMS, "weight": 3}, {"source": jsonl("train", list("abcdef")), "format": "gsm8k", "name": "letters"}]
    sets = [{"source": jsonl("eval", list("fgh")), "format": "gsm8k", "name": "rest"}, {"source": SUMS, "name": "sums"}]
    fresh = lambda: load(train=train, eval=sets, eval_size=20, prompt_template="{question} {braces}?")  # noqa: E731
    stream, held_out = fresh()
    assert [problem.source for problem in held_out] == ["rest"] * 3 + ["sums"] * 20
    drawn = stream.next_batch(400)
    assert Counter(problem.source for problem in drawn) == {"arithmetic": 300, "letters": 100}
    assert {problem.prompt for problem in drawn if problem.source == "letters"} == {f"{letter} {{braces}}?" for letter in "abcde"}
    assert all(problem.prompt.endswith("= {braces}?") for problem in drawn + held_out if problem.source in ("arithmetic", "sums"))
    assert {problem.level for problem in drawn if problem.source == "arithmetic"} == {2, 3, 4, 5}
    assert not {problem.prompt for problem in drawn} & {problem.prompt for problem in held_out}
    resumed, again = fresh()
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert again == held_out and resumed.next_batch(100) == stream.next_batch(100)
    with pytest.raises(UserError, match="data: .*other problems"):
        load(train=[{**train[0], "weight": 2}, train[1]], eval=sets)[0].load_state_dict(stream.state_dict())


def draw_prompts(train: str) -> tuple[list[str], list[str], dict]:
    stream, held_out = load(train=[{"source": SUMS}, {"source": train}], format="gsm8k", eval_size=10)
    return [p.prompt for p in held_out], [p.prompt for p in stream.next_batch(60)], stream.state_dict()


def test_the_order_is_the_same_in_every_process(jsonl):
    train = jsonl("train", [f"q{n}" for n in range(20)])
    assert call_in_fresh_process(draw_prompts, train, PYTHONHASHSEED="7") == draw_prompts(train)


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    """A local clone is read with `datasets`."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    clone = tmp_path / "openai" / "gsm8k"
    (clone / "main").mkdir(parents=True)
    (clone / "README.md").write_text(HUB_CARD)
    for split, count in (("train", 5), ("test", 2)):
        rows = [{"question": f"{split} {n}?", "answer": f"#### {n}", "unread": "x"} for n in range(count)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), clone / "main" / f"{split}-00000-of-00001.parquet")
    stream, held_out = load(train=f"hf:{clone}:main:train", eval=f"hf:{clone}:test", format="gsm8k")
    assert [(p.prompt, p.answer, p.source) for p in held_out] == [("test 0?", "0", "gsm8k/test"), ("test 1?", "1", "gsm8k/test")]
    assert sorted(p.id for p in stream.next_batch(5)) == [f"gsm8k/main/train:{n}" for n in range(1, 6)]
    for source, wrong in (
        (f"hf:{clone}:main:dev", 'cannot be loaded (Unknown split "dev"'),
        (f"hf:{clone}:socratic:train", "cannot be loaded (BuilderConfig 'socratic' not found"),
        (f"hf:{clone}", "is not of the form hf:OWNER/NAME:SPLIT"),
        ("hf:a/b::train", "is not of the form hf:OWNER/NAME:SPLIT"),
    ):
        with pytest.raises(UserError) as caught:
            load(train=source, format="gsm8k")
        assert str(caught.value).startswith(f"data.train = {source!r}: {wrong}") and "\n" not in str(caught.value)
    with pytest.raises(UserError, match="main:train:1': format math needs the field problem, found question, answer, unread; set format"):
        load(train=f"hf:{clone}:main:train", format="math")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = "data.train = 'hf:openai/gsm8k:main:train': cannot be loaded .*openai/gsm8k.*; check the name and the net"
    with pytest.raises(UserError, match=line):
        load(train="hf:openai/gsm8k:main:train", format="gsm8k")


@pytest.mark.skipif(not REAL.is_dir(), reason=f"the real data sets are not at {REAL}")
def test_real_sets_are_mixed_without_overlap(caplog):
    """MATH contains 285 questions of the DeepMATH sample, and a few questions repeat within a set."""
    files = {"math": "math_train/math.json", "deepmath": "deepmath_sample/math_deepmath_deal.jsonl", "gsm8k": "gsm8k/train.jsonl"}
    train = [{"source": str(REAL / file), "format": format, "weight": 2 if format == "math" else 1} for format, file in files.items()]
    tests = {"math": "math500/test.jsonl", "aime": "aime24/test.jsonl"}
    held_out = [{"source": str(REAL / file), "format": format} for format, file in tests.items()]
    stream, problems = load(train=train, eval=held_out, max_prompt_tokens=8192, eval_size=500)
    assert Counter(problem.source for problem in problems) == {"math500/test": 500, "aime24/test": 30}
    drawn = stream.next_batch(4 * 7473)
    assert Counter(problem.source for problem in drawn)["math_train/math"] == 2 * 7473
    questions = {normalize_question(problem.prompt): problem.source for problem in drawn}
    kept = {"math_train/math": 7470 - 1, "deepmath_sample/math_deepmath_deal": 4994 - 4 - 285, "gsm8k/train": 7473}
    assert Counter(questions.values()) == kept and "dropped 289 problems with repeated questions" in caplog.text
    assert not questions.keys() & {normalize_question(problem.prompt) for problem in problems}
    assert len({problem.id for problem in drawn}) == len(questions)


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
    state = load(train="own_sources:Doubles", eval="", settings={"largest": 9})[0].state_dict()
    load(train="own_sources:Doubles", eval="", settings={"largest": 9})[0].load_state_dict(state)
    for other in ({"settings": {"largest": 8}}, {"settings": {"largest": 9}, "seed": 1}):
        with pytest.raises(UserError, match="other problems or in another order"):
            load(train="own_sources:Doubles", eval="", **other)[0].load_state_dict(state)


def test_rows_of_a_function_are_read_like_those_of_a_file():
    stream, held_out = load(
        train=[{"source": "own_sources:rows", "settings": {"count": 5}, "name": "five"}],
        eval=[{"source": "own_sources:rows", "settings": {"count": 2}, "name": "two"}],
        format="gsm8k",
    )
    assert [(problem.id, problem.answer) for problem in held_out] == [("two:1", "0"), ("two:2", "1")]
    assert sorted(problem.id for problem in stream.next_batch(3)) == ["five:3", "five:4", "five:5"]


@pytest.mark.parametrize(
    "field, train, data, line",
    [
        ("data.train", "own_sources:absent", {}, "cannot be imported (AttributeError"),
        ("data.train", "own_sources:number", {}, "cannot be called with the settings {}"),
        ("data.train", "own_sources:Unidentified", {}, "fails (AttributeError: "),
        ("data.train", "own_sources:Numbers", {}, "fails (TypeError: fingerprint must be a tuple; id, prompt and"),
        ("data.eval", "own_sources:Doubles", {"eval": "own_sources:Few"}, "fails (IndexError: "),
        ("data.train", "own_sources:Doubles", {"settings": {"lagest": 3}}, "cannot be called with the settings {'lagest': 3} (TypeError: "),
        ("data.train", "own_sources:ends_early", {}, "fails after 1 rows (OSError: no disk)"),
        ("data.train", "own_sources:rows", {"settings": {"count": 1}, "format": None}, "needs a format; its fields are"),
        ("data.train", "own_sources:rows", {"settings": {"count": 1}, "format": "own_sources:rows"}, "format own_sources:rows fails ("),
        ("data.format", "own_sources:rows", {"format": "own_sources:nothing"}, "cannot be imported"),
        ("data.train", "", {}, "is required for training; use a JSONL, JSON or Parquet file, a hub data set as hf:OWNER/NAME:SPLIT"),
    ],
)
def test_each_mistake_is_one_line(tmp_path, field, train, data, line):
    with pytest.raises(UserError, match=f"^{re.escape(field)}.*: {re.escape(line)}") as caught:
        check_data(DataConfig(**{"train": train, "format": "gsm8k", **data}), tmp_path)
    assert "\n" not in str(caught.value)


def test_paths_and_hub_names_are_not_custom_sources():
    data = DataConfig(train=[{"source": "hf:gsm8k", "name": "a"}, {"source": "data/train.jsonl"}])
    assert [load_generator(source, data, "data.train") for source in data.train] == [None, None]
    assert [source.is_own for source in data.train] == [False, False]
