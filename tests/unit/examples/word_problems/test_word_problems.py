"""Word problems: right answers by an independent reading of the story, calculations that never meet, answers that the reward finds."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.word_problems.task import EXAMPLE, LEVELS, STORIES, WordProblems, is_held_out
from megatron_rl.errors import UserError
from megatron_rl.rewards.math import reward

seeds = st.integers(0, 2**32)


def calculation(problem):
    """The operation and the story's numbers in the order of the calculation."""
    for operation, stories in STORIES.items():
        for story in stories:
            pattern = re.sub(r"\\{(\w+)\\}", lambda field: rf"(?P<{field[1]}>\w+)" if field[1] in "ab" else r"\w+", re.escape(story))
            if match := re.fullmatch(pattern, problem.prompt):
                return operation, int(match["a"]), int(match["b"])
    raise AssertionError(problem.prompt)


@given(seeds, seeds)
def test_answers_are_right_and_no_calculation_is_on_both_sides(one_seed, other_seed):
    trained = [WordProblems(one_seed).train_problem(position) for position in range(24)]
    held_out = WordProblems(other_seed).held_out(24)
    for problems, side in ((trained, False), (held_out, True)):
        for index, problem in enumerate(problems):
            operation, a, b = calculation(problem)
            assert problem.level == index % 3 + 1 and operation == LEVELS[index % 3]
            assert problem.answer == str({"+": a + b, "-": a - b, "*": a * b}[operation])
            assert 2 <= b <= 10 and 2 <= (a - b if operation == "-" else a) <= 10
            assert is_held_out(operation, a, b) == side
            assert operation == "-" or is_held_out(operation, b, a) == side
    assert len({problem.id for problem in held_out}) == 24


def test_the_example_is_to_train_on_and_stands_before_every_question():
    assert EXAMPLE[1]["content"] == "3 + 4 = 7" and not is_held_out("+", 3, 4)
    assert all(problem.history == EXAMPLE for problem in (WordProblems(0).train_problem(0), *WordProblems(0).held_out(3)))


def test_the_reward_reads_the_ways_in_which_models_answer():
    problem = WordProblems(0).train_problem(2)
    for answer in ("3 * 4 = {}", "Mia has 3 * 4 = {} pens.", "{}", "The answer is {}."):
        assert reward(answer.format(problem.answer), problem).correct
        assert not reward(answer.format(int(problem.answer) + 1), problem).correct


def test_the_seed_alone_decides_and_what_cannot_be_is_refused():
    assert WordProblems(7).held_out(300) == WordProblems(7).held_out(300) != WordProblems(8).held_out(300)
    assert WordProblems(7).train_problem(5) == WordProblems(7).train_problem(5) != WordProblems(7).train_problem(8)
    for largest in (4, 101, 7.5):
        with pytest.raises(UserError, match=r"data\.settings\.largest"):
            WordProblems(0, largest)
    with pytest.raises(UserError, match=r"data\.max_prompt_tokens"):
        WordProblems(0).train_problem(0, lambda problem: False)
