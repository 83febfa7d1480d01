"""The generated task: right answers, values in range, and two sides that never meet."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.data.arithmetic import HELD_OUT_ONE_IN, WIDTH, generate, is_held_out, write_demonstration
from megatron_rl.errors import UserError
from megatron_rl.rewards.arithmetic import reward
from megatron_rl.types import Problem

seeds = st.integers(0, 2**32)
level_lists = st.lists(st.integers(1, 8), min_size=1, max_size=4)


@given(level_lists, seeds)
def test_a_question_keeps_every_value_in_range_and_has_the_right_answer(levels, seed):
    for index, problem in enumerate(generate(8, levels, seed, "train")):
        assert re.fullmatch(r"\d([+-][1-9])+ *=", problem.prompt)
        assert len(problem.prompt) == max(WIDTH, 1 + 2 * problem.level) + 1
        start, *changes = map(int, re.findall(r"^\d|[+-]\d", problem.prompt))
        values = [start + sum(changes[:done]) for done in range(len(changes) + 1)]
        assert all(0 <= value <= 9 for value in values)
        assert problem.answer == str(values[-1])
        assert problem.level == len(changes) == levels[index % len(levels)]


@given(level_lists, seeds, seeds)
def test_no_prompt_is_on_both_sides_whatever_the_seeds(levels, one_seed, other_seed):
    train = {problem.prompt for problem in generate(32, levels, one_seed, "train")}
    held_out = {problem.prompt for problem in generate(8, levels, other_seed, "eval")}
    assert len(held_out) == 8
    assert not train & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, train))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_seed_alone_decides_and_bad_levels_are_refused(split):
    assert generate(20, (1, 3), 7, split) == generate(20, (1, 3), 7, split)
    assert generate(20, (1, 3), 7, split) != generate(20, (1, 3), 8, split)
    for levels in ([], [0], [2, -1]):
        with pytest.raises(UserError, match="data.levels"):
            generate(1, levels, 0, split)


def test_level_one_can_be_held_out_to_its_last_question_and_no_further():
    every_question = {
        f"{start}{change:+d}".ljust(WIDTH) + "=" for start in range(10) for change in range(-9, 10) if change and 0 <= start + change <= 9
    }
    held_out = {question for question in every_question if is_held_out(question)}
    assert len(held_out) == pytest.approx(len(every_question) / HELD_OUT_ONE_IN, rel=0.5)
    assert {problem.prompt for problem in generate(len(held_out), [1], 0, "eval")} == held_out
    with pytest.raises(UserError, match=f"data.eval_size: .*level 1, and there are {len(held_out)}"):
        generate(len(held_out) + 1, [1], 0, "eval")


def test_the_two_kinds_of_worked_example():
    problem = Problem("arithmetic:5+3-6", "Compute 1+1= or rather 5+3-6=", "2", 2, "arithmetic")
    assert write_demonstration(problem, random.Random(0), 1.0) == "8,2#2"
    assert write_demonstration(problem, random.Random(0), 0.0) == "#2"
    rng = random.Random(0)
    step_by_step = sum("," in write_demonstration(problem, rng, 0.25) for _ in range(2000))
    assert step_by_step == pytest.approx(500, abs=100)
    with pytest.raises(UserError, match="model.warm_start.steps"):  # a problem from a file has none
        write_demonstration(Problem("gsm8k/train:1", "How many?", "3"), random.Random(0), 1.0)


@given(level_lists, seeds, st.sampled_from([0.0, 0.5, 1.0]))
def test_every_worked_example_earns_the_reward(levels, seed, share):
    rng = random.Random(seed)
    for problem in generate(8, levels, seed, "train"):
        assert reward(write_demonstration(problem, rng, share), problem).correct
