"""A data format: rows with `question` and with `answer`, a worked solution that ends in `#62`.

[data]
format = "examples.plugs.hash_format:read_row"
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.data.formats import ProblemRow, RowError


def read_row(row: Mapping[str, Any]) -> ProblemRow:
    """Return the question, the gold answer, and the number of solution steps as level. Raise RowError if there is no gold answer."""
    solution, marker, gold = row["answer"].rpartition("#")
    if not marker:
        raise RowError("the field answer has no # before the gold answer")
    return ProblemRow(row["question"], gold.strip(), level=len(solution.split(",")))
