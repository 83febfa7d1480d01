"""A data source: a list of `count` distinct training problems of `task`, for runs of several epochs.

[[data.train]]
source = "examples.arithmetic.rows:list_problems"
settings = {levels = [2, 3, 4, 5], count = 240}
columns = {question = "question", answer = "answer", level = "level"}
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from examples.arithmetic.task import Arithmetic


def list_problems(levels: Sequence[int], count: int) -> Iterator[dict[str, Any]]:
    """Yield rows. Raise UserError if the levels have too few problems."""
    task, seen = Arithmetic(0, levels), set[str]()
    for position in itertools.count():
        if len(seen) == count:
            return
        problem = task.train_problem(position, lambda candidate: candidate.prompt not in seen)
        seen.add(problem.prompt)
        yield {"question": problem.prompt, "answer": problem.answer, "level": problem.level}
