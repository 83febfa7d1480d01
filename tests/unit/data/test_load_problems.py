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
from megatron_rl.data.loading import normalize_question
from megatron_rl.errors import UserError

SUMS = "examples.arithmetic.task:Arithmetic"
REAL = Path(__file__).resolve().parents[3].parent / "shared" / "data"
HUB_CARD = (
    "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n  - {split: test, path: main/test-*}\n---\n"
)


load = functools.partial(support.load, train=SUMS, eval=SUMS)


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
