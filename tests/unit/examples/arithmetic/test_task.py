"""The generated task: right answers, values in range, and two sides that never meet."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.arithmetic.reward import reward
from examples.arithmetic.task import HELD_OUT_ONE_IN, Arithmetic, is_held_out, write_demonstration
from megatron_rl.errors import UserError
from megatron_rl.types import Problem

seeds = st.integers(0, 2**32)
level_lists = st.lists(st.integers(1, 8), min_size=1, max_size=4)


def train(count, levels, seed):
    return [Arithmetic(seed, levels).train_problem(position) for position in range(count)]


@given(level_lists, seeds)
def test_a_question_keeps_every_value_in_range_and_has_the_right_answer(levels, seed):
    for index, problem in enumerate(train(8, levels, seed)):
        assert re.fullmatch(r"\d([+-][1-9])+ *=", problem.prompt)
        assert len(problem.prompt) == 2 + 2 * max(levels)
        start, *changes = map(int, re.findall(r"^\d|[+-]\d", problem.prompt))
        values = [start + sum(changes[:done]) for done in range(len(changes) + 1)]
        assert all(0 <= value <= 9 for value in values)
        assert problem.answer == str(values[-1])
        assert problem.level == len(changes) == levels[index % len(levels)]


@given(level_lists, seeds, seeds)
def test_no_prompt_is_on_both_sides_whatever_the_seeds(levels, one_seed, other_seed):
    trained_on = {problem.prompt for problem in train(32, levels, one_seed)}
    held_out = {problem.prompt for problem in Arithmetic(other_seed, levels).held_out(8)}
    assert len(held_out) == 8
    assert not trained_on & held_out
    expressions = [[prompt.rstrip("= ") for prompt in prompts] for prompts in (held_out, trained_on)]
    assert all(map(is_held_out, expressions[0])) and not any(map(is_held_out, expressions[1]))


@pytest.mark.parametrize("draw", [lambda seed: train(20, (1, 3), seed), lambda seed: Arithmetic(seed, (1, 3)).held_out(20)])
def test_the_seed_alone_decides_and_bad_levels_are_refused(draw):
    assert draw(7) == draw(7) != draw(8)
    for levels in ([], [0], [2, -1], ["x"]):
        with pytest.raises(UserError, match="data.settings.levels"):
            Arithmetic(0, levels)


def test_level_one_can_be_held_out_to_its_last_question_and_no_further():
    every_question = {f"{start}{change:+d}" for start in range(10) for change in range(-9, 10) if change and 0 <= start + change <= 9}
    held_out = {f"{expression}=" for expression in every_question if is_held_out(expression)}
    assert len(held_out) == pytest.approx(len(every_question) / HELD_OUT_ONE_IN, rel=0.5)
    assert {problem.prompt for problem in Arithmetic(0, [1]).held_out(len(held_out))} == held_out
    with pytest.raises(UserError, match=f"data.eval_size: .*level 1, and there are {len(held_out)}"):
        Arithmetic(0, [1]).held_out(len(held_out) + 1)


def test_the_two_kinds_of_worked_example():
    problem = Problem("arithmetic:5+3-6", "Compute 1+1= or rather 5+3-6=", "2", 2, "arithmetic")
    assert write_demonstration(problem, random.Random(0), 1.0) == "8,2#2"
    rng = random.Random(0)
    guesses = Counter(write_demonstration(problem, rng, 0.0) for _ in range(300))
    assert guesses.keys() == {"#1", "#2", "#3"} and guesses["#2"] == pytest.approx(100, abs=40)
    step_by_step = sum("," in write_demonstration(problem, rng, 0.25) for _ in range(2000))
    assert step_by_step == pytest.approx(500, abs=100)


@given(level_lists, seeds)
def test_steps_earn_the_reward_and_a_guess_is_at_most_off_by_one(levels, seed):
    rng = random.Random(seed)
    for problem in train(8, levels, seed):
        assert reward(write_demonstration(problem, rng, 1.0), problem).correct
        assert abs(int(reward(write_demonstration(problem, rng, 0.0), problem).answer) - int(problem.answer)) <= 1
