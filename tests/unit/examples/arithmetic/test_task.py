"""The generated task: right answers, two sides that never meet, its reward, and the calculator with its worked examples."""

import random
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.arithmetic import calculator, supervised, tool_agent
from examples.arithmetic.calculator import Calculator, evaluate_expression
from examples.arithmetic.config import WarmStartConfig
from examples.arithmetic.reward import reward
from examples.arithmetic.task import HELD_OUT_ONE_IN, Arithmetic, is_held_out, write_demonstration
from megatron_rl.errors import UserError
from megatron_rl.rollout.environments.base import Message
from megatron_rl.types import Problem, Reward

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


def test_arithmetic_accepts_the_integer_after_the_last_hash_alone():
    for text in ("#62", "57+8=65,65-3=62#62", "#1#62", "#062"):
        assert reward(text, Problem("p", "?", "62")) == Reward(1.0, True, answer="62"), text
    wrong = ["", "62", "#", "#63", "#62 ", "#62\n", "#62.", "#62#", "# 62", "#+62", "#٦٢", "#62<|endoftext|>", "#" + "9" * 9999]
    for text in wrong:
        answer = "63" if text == "#63" else ""
        assert reward(text, Problem("p", "?", "62")) == Reward(0.0, False, answer=answer), text


@given(st.text(), st.integers(0, 99), st.integers(0, 99))
def test_arithmetic_depends_on_the_last_integer_only(text, stated, gold):
    assert reward(f"{text}#{stated}", Problem("p", "?", str(gold))).correct == (stated == gold)


PROBLEM = Problem("arithmetic:5+3-6", "5+3-6      =", "2", 2, "arithmetic")
REFUSED = [
    "", " ", "1+", "()", "1 2", "2**9", "9**9**9", "1/0", "1//0", "7/2", "1.5", "1e3", "0x10", "1_0", "True", "x", "print(1)", "1,2",
    "3(4)", "05", "1<2", "\x00", "9" * 16, "999999999*999999999", "(" * 64, "-" * 64, "1" + "+1" * 40, "１+１",
]  # fmt: skip


def test_values_and_refusals():
    values = {"5+3-6": 2, "12*3": 36, " 2 * (3 - 7) ": -8, "-(-4)": 4, "48/2": 24, "-7//2": -4, "+3": 3, "0": 0, "1+2*3": 7}
    assert {expression: evaluate_expression(expression) for expression in values} == values
    for expression in REFUSED:
        with pytest.raises(ValueError):
            evaluate_expression(expression)


@pytest.mark.parametrize(
    "text, reply",
    [
        ("<<5+3-6>>", "2"),
        ("so <<1+1>> and <<12*3>>", "36"),
        ("<<12*3>>\n", "36"),
        ("#2", None),
        ("<<1+1>>2#2", None),
        ("1+1>>", None),
        ("<<1<<2+2>>", "4"),
        ("<<>>", "?"),
        ("<<import os>>", "?"),
    ],
)
def test_a_turn_that_ends_with_a_call_is_answered(text, reply):
    message = Calculator(PROBLEM).step(text)
    assert (message and message.text) == reply
    assert message is None or bool(message.error) == (reply == "?")


def test_worked_examples_call_the_calculator_and_are_right():
    assert calculator.write_demonstration(PROBLEM) == ["<<5+3-6>>", "2", "#2"]
    for problem in map(Arithmetic(0).train_problem, range(40)):
        call, result, answer = calculator.write_demonstration(problem)
        assert Calculator(problem).step(call) == Message(result)
        assert reward(call + result + answer, problem).correct


def test_a_worked_example_teaches_what_the_policy_writes():
    letters = SimpleNamespace(eos_token_id=0, encode=lambda text, add_special_tokens: [*map(ord, text)])
    example = supervised.make_example([7, 8], ["<<1>>", "12", "#1"], letters)
    assert example.response_ids.tolist() == [*map(ord, "<<1>>12#1"), 0]
    assert example.response_mask.tolist() == [True] * 5 + [False] * 2 + [True] * 3


def test_the_share_of_worked_examples_that_call():
    choose = random.Random(0)
    problems = [Arithmetic(0, [2, 3]).train_problem(position) for position in range(2000)]
    warm = WarmStartConfig(tool_share=0.25, step_by_step_share=0.0)
    worked = [supervised.write_worked_answer(problem, warm, choose) for problem in problems]
    called = sum(len(parts) == 3 for parts in worked)
    assert abs(called - 500) < 4 * (2000 * 0.25 * 0.75) ** 0.5
    assert all(re.fullmatch(r"#\d", parts[0]) for parts in worked if len(parts) == 1)


def test_the_agents_tool_computes_and_answers_malformed_calls():
    assert tool_agent.call_tool('{"expression": "5+3-6"}') == "2"
    refused = {"{": "JSONDecodeError: ", "{}": "KeyError: ", "[]": "TypeError: ", '{"expression": "x"}': "ValueError: "}
    for arguments, reply in refused.items():
        assert tool_agent.call_tool(arguments).startswith(reply)
    assert tool_agent.call_tool('{"expression": 3}') == "expression must be a string"
    call, reply, answer = tool_agent.write_demonstration(PROBLEM)
    assert '{"expression": "5+3-6"}' in call and "\n2<" in reply and answer == "#2"
