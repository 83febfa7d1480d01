"""Trial calls of user code before a run. What fails on every call would otherwise be charged to the policy."""

import time
from collections.abc import Callable, Sequence

from megatron_rl.types import Problem
from megatron_rl.workers.pool import START_TIMEOUT

_ROWS = 3  # number of problems of each set that are tried before the user code is refused


def find_failure(call: Callable[[str, Problem], str], problems: Sequence[Problem]) -> str:
    """Call user code on the first problems of each set until a call succeeds. Return "", or a description of the failure if all calls of
    a set fail. `call(text, problem)` returns why the user code failed on a text that a policy might write, or ""."""
    by_set: dict[str, list[Problem]] = {}
    for problem in problems:
        by_set.setdefault(problem.source, []).append(problem)
    return next(filter(None, (_find_failure_of_set(call, of_set[:_ROWS]) for of_set in by_set.values())), "")


def _find_failure_of_set(call: Callable[[str, Problem], str], problems: Sequence[Problem]) -> str:
    first_error, start = "", time.monotonic()
    for problem in problems:
        for text in _write_texts(problem):
            error = call(text, problem)
            if not error:
                return ""
            first_error = first_error or " ".join(error.split())
            if time.monotonic() - start > START_TIMEOUT:  # the others would take as long
                return f"fails on the problem {problem.id} ({first_error})"
    return f"fails on the first problems of a set, such as {problems[0].id} ({first_error})"


def _write_texts(problem: Problem) -> tuple[str, ...]:
    """Return the gold answer in the formats that reward functions search for, and the gold answer alone."""
    return f"<think>\nLet me see.\n</think>\n<answer>\n\\boxed{{{problem.answer}}}\n</answer>\n#### {problem.answer}", problem.answer
