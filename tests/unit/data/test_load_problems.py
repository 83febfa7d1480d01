"""load_problems: held-out problems, dropped problems, and an order that resumes exactly."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from support import data as support
from support.processes import call_in_fresh_process

from megatron_rl.data import load_held_out
from megatron_rl.errors import UserError

SUMS = "examples.arithmetic.task:Arithmetic"
REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"
HUB_CARD = (
    "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n  - {split: test, path: main/test-*}\n---\n"
)


load = functools.partial(support.load, train=SUMS, eval=SUMS, max_left_out=1.0)


@pytest.fixture
def jsonl(write):
    return lambda name, questions: write(*({"question": q, "answer": f"#### {i}"} for i, q in enumerate(questions)), name=f"{name}.jsonl")


def test_held_out_problems_are_read_without_training_data():
    config = support.make_config(train="gone.jsonl", eval=SUMS, eval_size=7)
    assert load_held_out(config, support.count_bytes) == load(eval_size=7)[1]


def test_generated_problems_are_templated_and_not_held_out():
    stream, held_out = load(prompt_template="Q: {question} {braces}\n", eval_size=100)
    train = stream.next_batch(500)
    assert len({problem.prompt for problem in held_out}) == 100
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held_out}
    assert all(p.prompt.startswith("Q: ") and p.prompt.endswith("= {braces}\n") for p in train + held_out)
    assert {problem.level for problem in train} == {2, 3, 4, 5}


@pytest.mark.parametrize("eval_source", ["", SUMS])
@pytest.mark.parametrize("generated", [True, False])
def test_a_stream_resumes_exactly(jsonl, generated, eval_source):
    source = SUMS if generated else jsonl("train", [f"q{i}" for i in range(10)])
    fresh = lambda: load(train=source, eval=eval_source, format="gsm8k")  # noqa: E731
    stream, held_out = fresh()
    assert len(held_out) == (128 if eval_source else 0)
    stream.next_batch(7)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = stream.next_batch(25)
    resumed, _ = fresh()
    resumed.load_state_dict(state)
    assert resumed.next_batch(25) == expected


def test_training_problems_are_left_out_if_any_row_of_the_eval_file_asks_the_same(jsonl, caplog):
    """This includes rows whose answer differs or whose prompt is too long, and excludes other spellings, which may be the task."""
    long = "long" * 9
    train, held_out = jsonl("train", ["a", "How  many\nc?", "c", "d", long]), jsonl("eval", ["how many c? ", "x", "d", long])
    with caplog.at_level(logging.WARNING):
        stream, problems = load(train=train, eval=held_out, format="gsm8k", eval_size=1, max_prompt_tokens=20)
    assert len(problems) == 1 and problems[0].prompt in {"how many c? ", "x", "d"}
    assert {problem.prompt for problem in stream.next_batch(20)} == {"a", "How  many\nc?", "c"}
    assert re.search(r"/train\): left out 2 of 5 rows: 2 are also in data.eval \(such as \S+/train:4, which is \S+/eval:3\)", caplog.text)


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
    for counts, example in (("1 of 3", "train:2"), ("1 of 2", "eval:2")):
        assert re.search(rf"left out {counts} rows: 1 have prompts over 8 tokens \(such as \S+/{example}\)", caplog.text)
    assert "fewer than data.eval_size" in caplog.text


def test_sets_without_remaining_problems_are_refused(jsonl, write):
    train = jsonl("train", ["question one", "question two"])
    with pytest.raises(UserError, match=r"data.max_prompt_tokens = 3: all 2 prompts of data.train \("):
        load(train=train, eval="", format="gsm8k", max_prompt_tokens=3)
    with pytest.raises(UserError, match=r"data.max_prompt_tokens = 3: all 128 prompts of data.eval \(arithmetic\)"):
        load(max_prompt_tokens=3)
    with pytest.raises(UserError, match="data.settings.levels = .*level 5"):
        load(eval="", settings={"levels": [5, 6]}, max_prompt_tokens=12)
    with pytest.raises(UserError, match="data.train = .*also in data.eval"):
        load(train=train, eval=train, format="gsm8k")
    again = write({"question": "question two", "answer": "#### 1"}, name="again.jsonl")
    with pytest.raises(UserError, match="data.train = .*again.jsonl': all of its problems are in an earlier set; remove it"):
        load(train=[{"source": train}, {"source": again}], format="gsm8k")


def test_equal_rows_are_left_out(write, caplog):
    """Rows are equal if prompt, answer and columns are, case and blanks included."""
    row = lambda question, answer, **more: {"question": question, "answer": f"#### {answer}", **more}  # noqa: E731
    first = write(row("a", 1), row("b", 1), row("A", 1), row("a ", 1), row("a", 2), row("a", 1, seed=3), row("a", 1), name="first.jsonl")
    second, held_out = write(row("b", 1), row("c", 1), name="second.jsonl"), write(row("x", 1), row("X", 1), row("x", 1), name="eval.jsonl")
    stream, problems = load(train=[{"source": first}, {"source": second}], eval=held_out, format="gsm8k")
    assert [problem.prompt for problem in problems] == ["x", "X"]
    drawn = {(problem.prompt, problem.answer, problem.columns.get("seed")) for problem in stream.next_batch(20)}
    assert drawn == {
        ("a", "1", None),
        ("b", "1", None),
        ("A", "1", None),
        ("a ", "1", None),
        ("a", "2", None),
        ("a", "1", 3),
        ("c", "1", None),
    }
    for name, count, example in (
        ("first", "1 of 7", r"\S+first:7, which equals \S+first:1"),
        ("second", "1 of 2", r"\S+, which equals \S+first:2"),
    ):
        assert re.search(rf"/{name}\): left out {count} rows: 1 equal an earlier row \(such as {example}\)", caplog.text)
    assert re.search(r"/eval\): left out 1 of 3 rows: 1 equal an earlier row", caplog.text)


def test_rows_with_one_prompt_and_hidden_answers_are_different_problems(write):
    """Whether a held-out prompt is asked in training is the user's choice in such a game."""
    game = [{"question": "Guess my number.", "answer": f"#### {number}"} for number in range(100)]
    train, held_out = write(*game[10:], name="train.jsonl"), write(*game[:10], name="eval.jsonl")
    alone, _ = load(train=train, eval="", format="gsm8k", max_left_out=0.0)
    assert len({problem.answer for problem in alone.next_batch(90)}) == 90
    with pytest.raises(UserError, match='all of its questions are also in data.eval; .* data.overlap = "row"'):
        load(train=train, eval=held_out, format="gsm8k")
    both = write(*game, name="both.jsonl")
    stream, problems = load(train=both, eval=held_out, format="gsm8k", overlap="row", max_left_out=0.1)
    assert not {problem.answer for problem in stream.next_batch(90)} & {problem.answer for problem in problems}
    stream, _ = load(train=both, eval=held_out, format="gsm8k", overlap="allow", max_left_out=0.0)
    assert len({problem.answer for problem in stream.next_batch(100)}) == 100


def test_more_than_a_few_rows_are_only_left_out_if_the_user_says_so(jsonl, write):
    questions = [f"q{number}" for number in range(90)]
    rows = [{"question": question, "answer": "#### 1"} for question in [*questions, *questions[:10]]]
    source = write(*rows)
    with pytest.raises(UserError) as caught:
        support.load(train=source, format="gsm8k")
    line = str(caught.value)
    assert line.startswith("data.max_left_out = 0.05: data.train (") and line.endswith("; set it to 0.1 if this is intended")
    assert re.search(r"would lose 10.0 % of its 100 rows: 10 equal an earlier row \(such as \S+:91, which equals \S+:1\)", line)
    support.load(train=source, format="gsm8k", max_left_out=0.1)
    with pytest.raises(UserError, match='or data.overlap = "row" if equal questions with other answers are other problems$'):
        support.load(train=jsonl("train", questions), eval=jsonl("eval", questions[:9]), format="gsm8k")
    with pytest.raises(UserError, match=r"would lose 50.0 % of its 4 rows: 2 have no gold answer \(such as row 3\)"):
        support.load(train=write(*rows[:2], *({**row, "answer": None} for row in rows[:2])), format="gsm8k")
    with pytest.raises(UserError, match=r"would lose 33.3 % of its 3 rows: 1 have prompts over 8 tokens \(such as "):
        support.load(train=jsonl("long", ["a", "b", "long" * 9]), format="gsm8k", max_prompt_tokens=8)


def test_kept_columns_decide_which_rows_are_equal(write):
    rows = write(*({"question": "q", "answer": "#### 1", "id": number, "seed": number % 2} for number in range(6)))
    count = lambda **data: len({p.id for p in load(train=rows, eval="", format="gsm8k", **data)[0].next_batch(20)})  # noqa: E731
    assert (count(), count(keep_columns=("seed",)), count(keep_columns=())) == (6, 2, 1)


def test_a_mixture_of_generated_and_published_problems(jsonl):
    """Shares match the weights, held-out sets keep their order and names, no problem is in both, and the stream resumes."""
    train = [{"source": SUMS, "weight": 3}, {"source": jsonl("train", list("abcdef")), "format": "gsm8k", "name": "letters"}]
    sets = [{"source": jsonl("eval", list("fgh")), "format": "gsm8k", "name": "rest"}, {"source": SUMS, "name": "sums"}]
    fresh = lambda: load(train=train, eval=sets, eval_size=20, prompt_template="{question}?")  # noqa: E731
    stream, held_out = fresh()
    assert [problem.source for problem in held_out] == ["rest"] * 3 + ["sums"] * 20
    drawn = stream.next_batch(400)
    assert Counter(problem.source for problem in drawn) == {"arithmetic": 300, "letters": 100}
    assert {problem.prompt for problem in drawn if problem.source == "letters"} == {"a?", "b?", "c?", "d?", "e?"}
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
    _, held_out = load(train=f"hf:{clone}:main:train[2:]", eval=f"hf:{clone}:main:train[:2]", format="gsm8k")
    assert [(p.prompt, p.source) for p in held_out] == [(f"train {n}?", "gsm8k/main/train[:2]") for n in range(2)]
    for source, wrong in (
        (f"hf:{clone}:main:train[:9", "is not of the form hf:OWNER/NAME:SPLIT"),
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


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the data sets in ../shared/data")
def test_real_sets_are_mixed_without_overlap(caplog):
    """Sets share questions, but no rows: their columns differ. No held-out question is trained on."""
    files = {"math": "math_train/math.json", "deepmath": "deepmath_sample/math_deepmath_deal.jsonl", "gsm8k": "gsm8k/train.jsonl"}
    train = [{"source": str(REAL / file), "format": format, "weight": 2 if format == "math" else 1} for format, file in files.items()]
    tests = {"math": "math500/test.jsonl", "aime": "aime24/test.jsonl"}
    held_out = [{"source": str(REAL / file), "format": format} for format, file in tests.items()]
    stream, problems = support.load(train=train, eval=held_out, max_prompt_tokens=8192, eval_size=500)
    assert Counter(problem.source for problem in problems) == {"math500/test": 500, "aime24/test": 30}
    drawn = stream.next_batch(4 * 7473)
    assert Counter(problem.source for problem in drawn)["math_train/math"] == 2 * 7473
    assert not {problem.prompt for problem in drawn} & {problem.prompt for problem in problems}
    counts = Counter({problem.id: problem.source for problem in drawn}.values())
    assert counts["gsm8k/train"] == 7473 and 7400 < counts["math_train/math"] <= 7470
