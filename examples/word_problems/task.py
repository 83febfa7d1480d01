"""A data source that generates word problems: an addition, subtraction, or multiplication of small numbers, told as a story.

    [data]
    train = "examples.word_problems.task:WordProblems"
    eval = "examples.word_problems.task:WordProblems"

Example: `Mia has 7 shells and buys 5 more. How many shells does Mia have now?` The reward `math` finds the number in the response. Levels
1, 2, and 3 (addition, subtraction, multiplication) alternate. The chat shows one worked example before each question.

One calculation in `HELD_OUT_ONE_IN` is held out: it occurs in no training question, whatever the seed, the story, or the order of its
numbers, so a held-out question cannot be answered from memory.
"""

import hashlib
import random
from collections.abc import Callable, Iterator

from megatron_rl.errors import UserError
from megatron_rl.types import Problem

HELD_OUT_ONE_IN = 5
MOST_REDRAWS = 1_000
NAMES = ("Anna", "Ben", "Ella", "Emma", "Jack", "Leo", "Mia", "Nora", "Omar", "Paul", "Ruth", "Tom")
THINGS = ("apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "oranges", "shells", "stamps", "toys")
STORIES = {
    "+": (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "{name} had {a} {things} and got {b} more from a friend. How many {things} does {name} have now?",
        "There are {a} {things} in a box. {name} puts in {b} more. How many {things} are in the box?",
        "{name} finds {a} {things} on Monday and {b} {things} on Tuesday. How many {things} is that in total?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many {things} does {name} have left?",
        "{name} had {a} {things} and lost {b} of them. How many {things} are left?",
        "There are {a} {things} in a box. {name} takes out {b}. How many {things} are still in the box?",
        "{name} wants {a} {things} and has {b}. How many more {things} does {name} need?",
    ),
    "*": (
        "{name} buys {a} bags with {b} {things} each. How many {things} is that in total?",
        "There are {a} boxes. Each box holds {b} {things}. How many {things} are there in total?",
        "{name} gets {b} {things} every day. How many {things} does {name} get in {a} days?",
        "{a} friends have {b} {things} each. How many {things} do they have together?",
    ),
}
"""Operation -> stories. The calculation is `a` operation `b`."""
LEVELS = tuple(STORIES)
EXAMPLE = (
    {"role": "user", "content": "Sue has 3 pens and buys 4 more. How many pens does Sue have now?"},
    {"role": "assistant", "content": "3 + 4 = 7"},
)
"""Chat before every question. A small model adopts the short form of the answer."""


class WordProblems:
    """Problems with terms and factors from 2 to `largest`."""

    def __init__(self, seed: int, largest: int = 10) -> None:
        if not isinstance(largest, int) or not 5 <= largest <= 100:
            raise UserError("data.settings.largest", largest, "must be a whole number from 5 to 100", "use e.g. 10")
        self.seed, self.largest = seed, largest
        self.fingerprint = (largest, seed)

    def train_problem(self, position: int, accept: Callable[[Problem], bool] = lambda _: True) -> Problem:
        """Return the first training problem that `accept` accepts. Raise UserError if it rejects `MOST_REDRAWS` problems."""
        draws = self._draw(random.Random(f"{self.seed}/train/{position}"), position, held_out=False)
        for _ in range(MOST_REDRAWS):
            if accept(problem := next(draws)):
                return problem
        raise UserError("data.max_prompt_tokens", None, f"none of {MOST_REDRAWS} word problems is short enough", "raise it")

    def held_out(self, count: int) -> list[Problem]:
        """Return distinct questions. Raise UserError if there are too few."""
        rng = random.Random(f"{self.seed}/eval")
        draws = [self._draw(rng, position, held_out=True) for position in range(len(LEVELS))]
        problems: dict[str, Problem] = {}  # a dict keeps the order of the draws
        for _ in range(MOST_REDRAWS * count):
            if len(problems) == count:
                return list(problems.values())
            problem = next(draws[len(problems) % len(LEVELS)])
            problems.setdefault(problem.id, problem)
        raise UserError("data.eval_size", count, "exceeds the number of held-out word problems", "lower it or raise data.settings.largest")

    def _draw(self, rng: random.Random, position: int, held_out: bool) -> Iterator[Problem]:
        """Yield training or held-out problems of the level at this position, endlessly."""
        level = position % len(LEVELS)
        while True:
            a, b = rng.randint(2, self.largest), rng.randint(2, self.largest)
            if LEVELS[level] == "-":
                a += b
            if is_held_out(LEVELS[level], a, b) == held_out:
                yield _tell(rng, level, a, b)


def is_held_out(operation: str, a: int, b: int) -> bool:
    """Return whether a calculation is held out. For + and * the order of the numbers does not matter."""
    low, high = (a, b) if operation == "-" else sorted((a, b))
    return hashlib.sha256(f"{low}{operation}{high}".encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _tell(rng: random.Random, level: int, a: int, b: int) -> Problem:
    operation = LEVELS[level]
    question = rng.choice(STORIES[operation]).format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return Problem(f"word_problems:{question}", question, str(answer), level + 1, history=EXAMPLE)
