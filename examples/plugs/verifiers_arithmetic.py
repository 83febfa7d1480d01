"""An environment of the `verifiers` package: arithmetic with Python as a tool. See `verifiers_agent`."""

from __future__ import annotations

from typing import Any

import verifiers
from datasets import Dataset

from examples.arithmetic.sandbox import run_python


async def python(code: str) -> str:
    """Run Python code and return what it prints.

    Args:
        code: the program
    """
    return run_python(code)


def is_right(completion: list[Any], answer: str) -> float:
    """Return 1.0 where the last message ends with `#` and the answer."""
    return float(str(completion[-1].content).rpartition("#")[2] == answer)


def load_environment(max_turns: int = 3) -> verifiers.Environment:
    rows = Dataset.from_list([{"question": "1+1=", "answer": "2"}])  # the run has its own
    return verifiers.ToolEnv(dataset=rows, tools=[python], rubric=verifiers.Rubric(funcs=[is_right]), max_turns=max_turns)
