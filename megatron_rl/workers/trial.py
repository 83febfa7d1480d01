"""Trial calls of user code before a run. What fails on every call would otherwise be charged to the policy."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from megatron_rl.types import Problem
from megatron_rl.workers.pool import START_TIMEOUT

_ROWS = 3  # number of problems of each set that are tried before the user code is refused


def find_failure(call: Callable[[str, Problem], str], problems: Sequence[Problem]) -> str:
    """Call user code on the first problems of each set until a call succeeds. Return "" or, if all calls of a set fail, a description of the
    failure. `call(text, problem)` returns why it failed, or "". The text is one that a policy might write."""
    for of_set in _group_by_set(problems):
        start, first_error = time.monotonic(), ""
        for problem, text in ((problem, text) for problem in of_set[:_ROWS] for text in _write_texts(problem)):
            error = call(text, problem)
            if not error:
                break
            first_error = first_error or error
            if time.monotonic() - start > START_TIMEOUT:
                return f"fails on the problem {problem.id} ({first_error})"
        else:
            return f"fails on every completion of the first problems of a set, such as {of_set[0].id} ({first_error})"
    return ""


def _group_by_set(problems: Sequence[Problem]) -> Iterator[list[Problem]]:
    for _, of_set in itertools.groupby(sorted(problems, key=lambda problem: problem.source), lambda problem: problem.source):
        yield [*of_set]


def _write_texts(problem: Problem) -> tuple[str, ...]:
    """Return the gold answer in the formats that reward functions search for, and the gold answer alone."""
    return f"<think>\nLet me see.\n</think>\n<answer>\n\\boxed{{{problem.answer}}}\n</answer>\n#### {problem.answer}", problem.answer
