"""load_problems: what is held out, what is left out, and an order that resumes exactly."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config import Config, Model
from megatron_rl.config_data import Data
from megatron_rl.data import load_problems
from megatron_rl.data.stream import shuffled_epochs
from megatron_rl.data.tokenizer import load_tokenizer, make_byte_tokenizer
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

GSM8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_byte_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    return lambda **data: load_problems(Config(model=Model(path=folder), data=Data(**data)), tokenizer)


@pytest.fixture
def jsonl(tmp_path):
    def write(name: str, questions: list[str]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"question": q, "answer": f"#### {i}"}) + "\n" for i, q in enumerate(questions)))
        return str(path)

    return write


def test_generated_problems_carry_the_template_and_stay_apart(load):
    stream, held_out = load(prompt_template="Q: {question} {braces}\n", eval_size=100)
    train = stream.next_batch(500)
    assert len({problem.prompt for problem in held_out}) == 100
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held_out}
    assert all(p.prompt.startswith("Q: ") and p.prompt.endswith("= {braces}\n") for p in train + held_out)
    assert {problem.level for problem in train} == {2, 3, 4, 5}


@pytest.mark.parametrize("eval_source", [None, "arithmetic"])
@pytest.mark.parametrize("generated", [True, False])
def test_a_stream_resumes_exactly(load, jsonl, generated, eval_source):
    source = "arithmetic" if generated else jsonl("train.jsonl", [f"q{i}" for i in range(10)])
    fresh = lambda: load(train=source, eval=eval_source, format="gsm8k")  # noqa: E731
    stream, held_out = fresh()
    assert len(held_out) == (128 if eval_source else 0)
    stream.next_batch(7)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = stream.next_batch(25)
    resumed, _ = fresh()
    resumed.load_state_dict(state)
    assert resumed.next_batch(25) == expected


def test_a_position_in_other_data_is_refused(load):
    state = load(seed=1)[0].state_dict()
    with pytest.raises(UserError, match="data: .*other problems"):
        load(seed=2)[0].load_state_dict(state)


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 100))
def test_every_epoch_holds_every_problem_once(size, batch, seed):
    problems = [Problem(str(i), f"q{i}", str(i)) for i in range(size)]
    stream = shuffled_epochs(problems, seed)
    drawn = [problem for _ in range(-(-3 * size // batch)) for problem in stream.next_batch(batch)]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size], key=problems.index) == problems


def test_epochs_are_shuffled_differently():
    stream = shuffled_epochs([Problem(str(i), f"q{i}", str(i)) for i in range(50)], 0)
    assert stream.next_batch(50) != stream.next_batch(50)


def test_train_loses_what_any_row_of_the_eval_file_holds(load, jsonl, caplog):
    train, held_out = jsonl("train.jsonl", ["a", "b", "c", "d"]), jsonl("eval.jsonl", ["b", "x", "d"])
    with caplog.at_level(logging.WARNING):
        stream, problems = load(train=train, eval=held_out, format="gsm8k", eval_size=1)
    assert len(problems) == 1 and problems[0].prompt in {"b", "x", "d"}
    assert {problem.prompt for problem in stream.next_batch(20)} == {"a", "c"}
    assert "left out 2 problems" in caplog.text


def test_generated_train_avoids_an_eval_file(load, jsonl):
    seen = {problem.prompt for problem in load(eval=None, levels=(1,))[0].next_batch(300)}
    stream, _ = load(eval=jsonl("eval.jsonl", sorted(seen)), format="gsm8k", levels=(1,))
    assert not {problem.prompt for problem in stream.next_batch(300)} & seen


def test_long_prompts_are_left_out_and_counted(load, jsonl, caplog):
    train, held_out = jsonl("train.jsonl", ["short", "long" * 10, "tiny"]), jsonl("eval.jsonl", ["s", "l" * 99])
    with caplog.at_level(logging.WARNING):
        stream, problems = load(train=train, eval=held_out, format="gsm8k", max_prompt_tokens=8)
    assert {problem.prompt for problem in stream.next_batch(10)} == {"short", "tiny"}
    assert [problem.prompt for problem in problems] == ["s"]
    assert "data.train: left out 1 of 3" in caplog.text and "data.eval: left out 1 of 2" in caplog.text
    assert "fewer than data.eval_size" in caplog.text


def test_nothing_left_is_refused(load, jsonl):
    train = jsonl("train.jsonl", ["question one", "question two"])
    with pytest.raises(UserError, match="data.max_prompt_tokens = 3: all 2 prompts of data.train"):
        load(train=train, eval=None, format="gsm8k", max_prompt_tokens=3)
    with pytest.raises(UserError, match="data.max_prompt_tokens = 3: all 128 prompts of data.eval"):
        load(max_prompt_tokens=3)
    with pytest.raises(UserError, match="data.levels = .*level 6"):
        load(eval=None, levels=(5, 6), max_prompt_tokens=12)
    with pytest.raises(UserError, match="data.train = .*also in data.eval"):
        load(train=train, eval=train, format="gsm8k")


def test_missing_files_name_their_field(load, tmp_path):
    for field in ("train", "eval"):
        with pytest.raises(UserError, match=f"data.{field} = .*does not exist"):
            load(**{field: str(tmp_path / "absent.jsonl")})


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"the GSM8K files are not at {GSM8K}")
def test_real_gsm8k_loads_whole(load):
    files = {"train": str(GSM8K / "train.jsonl"), "eval": str(GSM8K / "test.jsonl")}
    stream, held_out = load(**files, format="gsm8k", eval_size=1319, max_prompt_tokens=4096)
    assert len(held_out) == 1319
    assert len({problem.id for problem in stream.next_batch(7473)}) == 7473
    assert all(float(problem.answer) == int(problem.answer) for problem in held_out)
