"""The calculator: what it computes, what it refuses, and worked examples that call it."""

from __future__ import annotations

import random
import re

import pytest

from examples.arithmetic import supervised, tool_agent
from examples.arithmetic.calculator import Calculator, evaluate_expression, write_demonstration
from examples.arithmetic.config import WarmStartConfig
from examples.arithmetic.reward import reward
from examples.arithmetic.task import Arithmetic
from megatron_rl.rollout.environments.base import Message
from megatron_rl.types import Problem

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
    assert write_demonstration(PROBLEM) == ["<<5+3-6>>", "2", "#2"]
    for problem in map(Arithmetic(0).train_problem, range(40)):
        call, result, answer = write_demonstration(problem)
        assert Calculator(problem).step(call) == Message(result)
        assert reward(call + result + answer, problem).correct


class Letters:
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


def test_a_worked_example_teaches_what_the_policy_writes():
    example = supervised.make_example([7, 8], ["<<1>>", "12", "#1"], Letters())
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
    for arguments, reply in (
        ("{", "JSONDecodeError: "),
        ("{}", "KeyError: "),
        ("[]", "TypeError: "),
        ('{"expression": "x"}', "ValueError: "),
    ):
        assert tool_agent.call_tool(arguments).startswith(reply)
    assert tool_agent.call_tool('{"expression": 3}') == "expression must be a string"
    call, reply, answer = tool_agent.write_demonstration(PROBLEM)
    assert '{"expression": "5+3-6"}' in call and "\n2<" in reply and answer == "#2"
