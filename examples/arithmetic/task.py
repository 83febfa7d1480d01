"""A data source that generates problems: chains of additions and subtractions of graded difficulty.

    [data]
    train = "examples.arithmetic.task:Arithmetic"
    eval = "examples.arithmetic.task:Arithmetic"
    settings = {levels = [2, 3, 4, 5]}

A problem of level n starts with a digit and adds or subtracts n digits; every intermediate result is a digit. The level-2 question
`5+3-6=` has two kinds of worked examples: step by step, with every intermediate result (`8,2#2`), and a guess (`#2`) that is off by one two
times in three. The answer follows the `#`. Questions are padded to the width of the highest level, and each step has as many characters in
the answer as in the question, so that a model of two layers can learn the task within a minute on a CPU.

Training and held-out questions never overlap: a hash of the expression decides, whatever the seed.
"""

import functools
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

from megatron_rl.errors import UserError
from megatron_rl.types import Problem

SOURCE = "examples.arithmetic.task:Arithmetic"
HELD_OUT_ONE_IN = 8
ENUMERATED_LEVELS = 3
"""Up to this level, all questions are listed (90, 810, and 7,290). Questions of higher levels are drawn at random."""
MOST_DRAWN_PER_LEVEL = 4_000
"""Maximum number of held-out questions of a drawn level. Level 4 has about twice as many."""
MOST_REDRAWS = 1_000


class Arithmetic:
    """Problems of alternating `levels`. A level listed twice is drawn twice as often."""

    def __init__(self, seed: int, levels: Sequence[int] = (2, 3, 4, 5)) -> None:
        if not levels or not all(isinstance(level, int) for level in levels) or min(levels) < 1:
            raise UserError("data.settings.levels", list(levels), "must name at least one level, each 1 or more", "use e.g. [1, 2, 3, 4]")
        self.seed, self.levels = seed, tuple(levels)
        self.width = 1 + 2 * max(levels)
        """Characters of a question before the `=`, including padding."""
        self.fingerprint = (self.levels, seed)

    def train_problem(self, position: int, accept: Callable[[Problem], bool] = lambda _: True) -> Problem:
        """Return the first training problem that `accept` accepts. Raise UserError if it rejects `MOST_REDRAWS` problems."""
        level = self.levels[position % len(self.levels)]
        rng = random.Random(f"{self.seed}/train/{position}")
        for _ in range(MOST_REDRAWS):
            expression = _draw_expression(rng, level)
            if not is_held_out(expression) and accept(problem := self._problem(expression, level)):
                return problem
        rule = f"no train problem of level {level} is left once prompts that are too long or held out are removed"
        raise UserError("data.settings.levels", list(self.levels), rule, "raise data.max_prompt_tokens or change the levels")

    def held_out(self, count: int) -> list[Problem]:
        """Return distinct questions. Raise UserError if there are too few."""
        cycle = [self.levels[index % len(self.levels)] for index in range(count)]
        rng = random.Random(f"{self.seed}/eval")
        drawn = {level: iter(_distinct_held_out(level, needed, rng)) for level, needed in sorted(Counter(cycle).items())}
        return [self._problem(next(drawn[level]), level) for level in cycle]

    def _problem(self, expression: str, level: int) -> Problem:
        """Return the problem. Its id contains the unpadded expression, which `write_demonstration` reads."""
        answer = sum(int(term) for term in re.findall(r"[+-]?\d+", expression))
        return Problem(f"arithmetic:{expression}", expression.ljust(self.width) + "=", str(answer), level)


def is_held_out(expression: str) -> bool:
    """Return whether an unpadded expression such as `5+3-6` is held out."""
    return int.from_bytes(hashlib.sha256(expression.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def write_demonstration(problem: Problem, rng: random.Random, step_by_step_share: float) -> str:
    """Return a worked answer: step by step with probability `step_by_step_share`, else a guess."""
    if rng.random() >= step_by_step_share:
        return f"#{min(max(int(problem.answer) + rng.choice((-1, 0, 1)), 0), 9)}"
    start, *changes = re.findall(r"^\d|[+-]\d", problem.id.removeprefix("arithmetic:"))
    results = list(itertools.accumulate(map(int, changes), initial=int(start)))[1:]
    return ",".join(map(str, results)) + f"#{problem.answer}"


def _operations(value: int) -> list[int]:
    """Return the signed digits that keep `value` between 0 and 9."""
    return [change for change in range(-value, 10 - value) if change]


def _draw_expression(rng: random.Random, level: int) -> str:
    value = rng.randrange(10)
    text = str(value)
    for _ in range(level):
        change = rng.choice(_operations(value))
        text, value = f"{text}{change:+d}", value + change
    return text


@functools.cache
def _listed_held_out(level: int) -> tuple[str, ...]:
    """Return all held-out expressions of a level in a fixed order."""
    chains = [(str(start), start) for start in range(10)]
    for _ in range(level):
        chains = [(f"{text}{change:+d}", value + change) for text, value in chains for change in _operations(value)]
    return tuple(text for text, _ in chains if is_held_out(text))


def _distinct_held_out(level: int, count: int, rng: random.Random) -> list[str]:
    """Return `count` distinct held-out expressions of a level in random order."""
    listed = _listed_held_out(level) if level <= ENUMERATED_LEVELS else None
    available = MOST_DRAWN_PER_LEVEL if listed is None else len(listed)
    if count > available:
        rule = f"needs {count} held-out problems of level {level}, and there are {available}"
        raise UserError("data.eval_size", None, rule, "lower it or add levels")
    if listed is not None:
        return rng.sample(listed, count)
    expressions: dict[str, None] = {}  # a dict keeps the order of the draws
    while len(expressions) < count:
        expression = _draw_expression(rng, level)
        if is_held_out(expression):
            expressions[expression] = None
    return list(expressions)
