r"""Formats: the columns in which a published data set keeps question, gold answer and level, and how the gold answer is written.

    gsm8k       question, answer: a worked solution that ends in `#### 1,080`
    math        problem, answer; or problem, solution with the answer in its last `\boxed{}`; level or difficulty
    deepmath    question, final_answer, difficulty; also as prompt, ground_truth
    aime        problem or question, answer or expected_answer: an integer from 0 to 999

Other columns are ignored. A row whose answer is null or blank has no gold answer: published files contain some. A format of your own is a
function from a row to a `ProblemRow` (`RowReader`); rows that differ in the columns' names alone need none (`columns.py`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_rl.plugs import DATA_FORMATS
from megatron_rl.rewards.math import last_boxed
from megatron_rl.types import ChatMessage

_GROUPED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_LEVEL = re.compile(r"(?:Level )?([0-9]+)(?:\.[0-9]+)?")
_AIME_ANSWER = re.compile(r"\$?([0-9]{1,3})(?:\^\{?\\circ\}?)?\$?")  # one answer of 2025 is published as 336^\circ
_HASHES = re.compile("(?<!#)####(?!#)")
_CORRECT = "correct or remove this row"


class RowError(ValueError):
    """What is wrong with a row, and the fix; becomes a UserError with the file and the row's number."""

    def __init__(self, rule: str, fix: str = _CORRECT) -> None:
        self.rule, self.fix = rule, fix
        super().__init__(rule)


@dataclass(frozen=True)
class ProblemRow:
    """The contents of a row. `gold` is empty where it has no answer; `level` is 0 where it has none."""

    question: str
    gold: str
    level: int = 0
    history: tuple[ChatMessage, ...] = ()
    """A chat's messages before the question."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """[{"type": "function", "function": {name, description, parameters}}], as chat templates take them."""
    pass_rate: float | None = None
    """Share of correct answers to it, from 0 to 1; None where it is not known."""


class RowReader(Protocol):
    """A format: it gets a row with all its columns, and raises RowError for a malformed one."""

    def __call__(self, row: Mapping[str, Any]) -> ProblemRow: ...


def read_row(row: object, format: str | None, read: RowReader | None) -> ProblemRow:
    """Return question, gold and level of one decoded row; `read` is what `format` names. Raise RowError for another format or none, with
    the columns found and the formats that they fit."""
    if not isinstance(row, Mapping):
        raise RowError(f"must be a JSON object, not {type(row).__name__}")
    if read is None:
        formats = (
            _fitting_formats(row) or 'columns to the names of question and answer, e.g. columns = {question = "prompt", answer = "target"}'
        )
        raise RowError(f"needs a format; its fields are {_list_columns(row)}", f"set {formats}")
    try:
        result = read(row)
        if not isinstance(result, ProblemRow) or not isinstance(result.question, str) or not isinstance(result.gold, str):
            raise TypeError(f"it returned {result!r:.80}, not a ProblemRow of texts")
        if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in result.history):
            raise TypeError(f"history = {result.history!r:.80}, not messages with role and content")
        if result.pass_rate is not None and not 0 <= result.pass_rate <= 1:
            raise TypeError(f"pass_rate = {result.pass_rate!r:.40}, not from 0 to 1")
        return result
    except _ColumnError as missing:
        fix = f"set {formats}" if (formats := _fitting_formats(row)) else _CORRECT
        raise RowError(f"format {format} needs the field {missing}, found {_list_columns(row)}", fix) from None
    except RowError as error:
        formats = _fitting_formats(row) if error.fix == _CORRECT else ""
        raise RowError(error.rule, f"{error.fix}, or set {formats}" if formats else error.fix) from None
    except Exception as error:
        if format in DATA_FORMATS.builtin:
            raise
        raise RowError(f"format {format} fails ({type(error).__name__}: {error})") from None


class _ColumnError(Exception):
    pass


@dataclass(frozen=True)
class _Reader:
    """Columns by their content, the preferred one first, and how a column's text gives the gold answer."""

    question: tuple[str, ...]
    answer: Mapping[str, Callable[[str, str], str]]
    level: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.question, *self.answer, *self.level)

    def __call__(self, row: Mapping[str, Any]) -> ProblemRow:
        question_column = _find_column(row, self.question)
        question = read_text(row[question_column], question_column)
        if not question.strip():
            raise RowError(f"the field {question_column} is empty")
        _find_column(row, self.answer)
        answer_column = next((name for name in self.answer if not is_blank(row.get(name))), None)
        gold = (
            self.answer[answer_column](answer_column, read_text(row[answer_column], answer_column, numbers=True)) if answer_column else ""
        )
        return ProblemRow(question, gold, next((parse_level(row[name]) for name in self.level if name in row), 0))


def _find_column(row: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the first of `names` that the row has. Raise _ColumnError where it has none."""
    for name in names:
        if name in row:
            return name
    raise _ColumnError(" or ".join(names))


def is_blank(value: Any) -> bool:
    """Return whether this is no answer: null, or a text without a letter."""
    return value is None or (isinstance(value, str) and not value.strip())


def read_text(value: Any, name: str, numbers: bool = False) -> str:
    """Return what the field `name` holds as text; `numbers` are accepted, too. Raise RowError for other types and for what no tokenizer
    can encode."""
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"the field {name} must be a string, not {type(value).__name__}")
    if any("\ud800" <= character <= "\udfff" for character in value):  # JSON can escape a lone surrogate
        raise RowError(f"the field {name} holds a lone surrogate")
    return value


def read_pass_rate(value: object, name: str) -> float | None:
    """Return a share from 0 to 1, or None for null. Raise RowError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RowError(f"the field {name} must be a number from 0 to 1, or null, not {value!r:.40}")
    return float(value)


def parse_level(value: object) -> int:
    """Return 5 for `5`, `"Level 5"` and `5.5`; 0 for what is no level, such as null, `"Level ?"` and -1."""
    match = _LEVEL.fullmatch(str(value))
    return int(match[1]) if match else 0


def _strip(column: str, text: str) -> str:
    return text.strip()


def _after_hashes(column: str, text: str) -> str:
    matches = list(_HASHES.finditer(text))
    if not matches:
        raise RowError(f"the field {column} has no #### before the gold answer")
    number = text[matches[-1].end() :].strip()
    return number.replace(",", "") if _GROUPED_NUMBER.fullmatch(number) else number


def _boxed(column: str, text: str) -> str:
    r"""Return the content of the last `\boxed{...}`; `\fbox{...}` and `\boxed 5` occur, too."""
    text = text.replace(r"\fbox", r"\boxed")
    if (content := last_boxed(text)) is not None:
        return content.strip()
    if bare := re.findall(r"\\boxed\s+([^\s$.,]+)", text):
        return str(bare[-1])
    raise RowError(rf"the field {column} has no \boxed{{}} with the gold answer")


def _up_to_three_digits(column: str, text: str) -> str:
    match = _AIME_ANSWER.fullmatch(text.strip())
    if not match:
        raise RowError(f"the field {column} must hold an integer from 0 to 999, not {text.strip()[:40]!r}")
    return str(int(match[1]))


gsm8k = _Reader(("question",), {"answer": _after_hashes})
math = _Reader(("problem",), {"answer": _strip, "solution": _boxed}, ("level", "difficulty"))
deepmath = _Reader(("question", "prompt"), {"final_answer": _strip, "ground_truth": _strip}, ("difficulty",))
aime = _Reader(
    ("problem", "Problem", "question"),
    {"answer": _up_to_three_digits, "Answer": _up_to_three_digits, "expected_answer": _up_to_three_digits},
)

KNOWN_COLUMNS = frozenset(column for reader in (gsm8k, math, deepmath, aime) for column in reader.columns)
"""Every column that some built-in format reads."""


def _list_columns(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"


def _fitting_formats(row: Mapping[str, Any]) -> str:
    """Return the formats that can read this row; empty where none can."""
    formats = []
    for name in DATA_FORMATS.builtin:
        with contextlib.suppress(RowError, _ColumnError):
            if DATA_FORMATS.load(name)(row).gold:
                formats.append(f'format = "{name}"')
    return " or ".join(formats)
