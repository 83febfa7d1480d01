"""Counts the rows of a set that are left out, by reason, and refuses a set that loses more of them than the user allows."""

import logging
import math

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError

_log = logging.getLogger(__name__)

REPEATED = "equal an earlier row"
HELD_OUT = "are also in data.eval"
UNANSWERED = "have no gold answer"
TOO_LONG = "have prompts over {} tokens"


class LeftOut:
    """The rows of the set `name` that are left out. `quiet`: log nothing."""

    def __init__(self, name: str, data: DataConfig, quiet: bool = False) -> None:
        self._name, self._data, self._quiet = name, data, quiet
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, reason: str, example: str, count: int = 1) -> None:
        """Count rows that are left out. `example` describes one of them."""
        self._examples.setdefault(reason, example)
        self._counts[reason] = self._counts.get(reason, 0) + count

    def report(self, total: int) -> None:
        """Log each reason with its number of rows and an example. Raise UserError if they are too many of the `total` rows."""
        lines = [f"{count} {reason} (such as {self._examples[reason]})" for reason, count in self._counts.items()]
        if not lines:
            return
        share, limit = sum(self._counts.values()) / total, self._data.max_left_out
        if share > limit:
            fix = f"set it to {math.ceil(100 * share) / 100:g} if this is intended"
            if HELD_OUT in self._counts:
                fix += ', or data.overlap = "row" if equal questions with other answers are other problems'
            rule = f"{self._name} would lose {100 * share:.1f} % of its {total} rows: {', '.join(lines)}"
            raise UserError("data.max_left_out", limit, rule, fix)
        self.warn("%s: left out %d of %d rows: %s", self._name, sum(self._counts.values()), total, ", ".join(lines))

    def warn(self, text: str, *values: object) -> None:
        if not self._quiet:
            _log.warning(text, *values)
