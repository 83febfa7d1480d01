"""A data source that lists problems: `count` distinct ones of the train side of `task`, so that runs pass through them several times.

[[data.train]]
source = "examples.arithmetic.rows:list_problems"
settings = {levels = [2, 3, 4, 5], count = 240}
columns = {question = "question", answer = "answer", level = "level"}
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from examples.arithmetic.task import Arithmetic


def list_problems(levels: Sequence[int], count: int) -> Iterator[dict[str, Any]]:
    """Yield rows. Raise UserError for levels that have too few problems."""
    task, seen = Arithmetic(0, levels), set[str]()
    for position in itertools.count():
        if len(seen) == count:
            return
        problem = task.train_problem(position, lambda candidate: candidate.prompt not in seen)
        seen.add(problem.prompt)
        yield {"question": problem.prompt, "answer": problem.answer, "level": problem.level}
