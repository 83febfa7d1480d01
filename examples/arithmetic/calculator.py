"""An environment: the policy writes `<<5+3-6>>` and the calculator continues with `2`. Also has worked examples for the warm start.

    [environment]
    name = "examples.arithmetic.calculator:Calculator"

It supports integers, + - * / //, and parentheses. Expressions are parsed and their syntax trees evaluated; no code is executed.
"""

import ast
import operator
import re
from collections.abc import Callable

from megatron_rl.rollout.environments.base import Message
from megatron_rl.types import Problem

ENVIRONMENT = "examples.arithmetic.calculator:Calculator"
MAX_EXPRESSION_LENGTH = 64
MAX_ABS_VALUE = 10**15
"""Limit of every intermediate result. It also bounds the time of a multiplication."""
_CALL = re.compile(r"<<([^<>]*)>>\s*$")
_ALPHABET = re.compile(r"[0-9+\-*/() ]+")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class Calculator:
    """Replies to a turn that ends with a call, with the result or with `?`. Any other turn ends the completion."""

    stop = (">>",)

    def __init__(self, problem: Problem) -> None: ...

    def step(self, text: str) -> Message | None:
        call = _CALL.search(text)
        if call is None:
            return None
        try:
            return Message(str(evaluate_expression(call[1])))
        except ValueError as error:
            return Message("?", str(error))


def evaluate_expression(expression: str) -> int:
    """Return the value of an expression such as `12*(3-1)`. Raise ValueError if it is invalid, not an integer, or too large."""
    if len(expression) > MAX_EXPRESSION_LENGTH or not _ALPHABET.fullmatch(expression):
        raise ValueError(f"needs 1 to {MAX_EXPRESSION_LENGTH} digits, operators and brackets")
    try:
        return _evaluate_node(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, MemoryError) as error:  # MemoryError: nested too deeply for the parser
        raise ValueError(f"{type(error).__name__} in {expression}") from None


def _evaluate_node(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _evaluate_node(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp):
        value = _apply_operator(node.op, _evaluate_node(node.left), _evaluate_node(node.right))
    else:
        raise ValueError(f"cannot compute {type(node).__name__}")
    if abs(value) > MAX_ABS_VALUE:
        raise ValueError(f"a number is larger than {MAX_ABS_VALUE}")
    return value


def _apply_operator(kind: ast.operator, left: int, right: int) -> int:
    if isinstance(kind, ast.Div):
        if left % right:
            raise ValueError(f"{left}/{right} is no whole number")
        return left // right
    if type(kind) not in _OPERATORS:
        raise ValueError(f"cannot compute {type(kind).__name__}")
    return _OPERATORS[type(kind)](left, right)


def write_demonstration(problem: Problem) -> list[str]:
    """Return the turns of a correct answer: the policy's call, the calculator's result, the policy's answer."""
    call = f"<<{problem.id.partition(':')[2]}>>"
    result = Calculator(problem).step(call)
    assert result is not None and not result.error
    return [call, result.text, f"#{problem.answer}"]
