r"""Formats: in which columns a published data set keeps question, gold answer and level, and how the gold is written there.

    gsm8k       question, answer: a worked solution that ends in `#### 1,080`
    arithmetic  question, answer: a worked solution that ends in `#62`
    math        problem, answer; or problem, solution with the answer in its last `\boxed{}`; level or difficulty
    deepmath    question, final_answer, difficulty; also as prompt, ground_truth
    aime        problem or question, answer or expected_answer: an integer from 0 to 999

Other columns are ignored. A row whose answer is null or blank has no gold: published files hold some.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.data import FormatName
from megatron_rl.rewards.math import last_boxed

_GROUPED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_LEVEL = re.compile(r"(?:Level )?([0-9]+)(?:\.[0-9]+)?")
_AIME_ANSWER = re.compile(r"\$?([0-9]{1,3})(?:\^\{?\\circ\}?)?\$?")  # one answer of 2025 is published as 336^\circ
_CORRECT = "correct or remove this row"


class RowError(ValueError):
    """What is wrong with a row, and the fix; becomes a UserError where the file and the row's number are known."""

    def __init__(self, rule: str, fix: str = _CORRECT) -> None:
        self.rule, self.fix = rule, fix
        super().__init__(rule)


@dataclass(frozen=True)
class ProblemRow:
    """What a problem is made of. `gold` is empty where the row has no answer; `level` is 0 where it has none."""

    question: str
    gold: str
    level: int


def read_row(row: object, format: FormatName) -> ProblemRow:
    """Question, gold and level of one decoded row. Raises RowError: not of this format, with the format that would fit."""
    if not isinstance(row, Mapping):
        raise RowError(f"must be a JSON object, not {type(row).__name__}")
    try:
        return _READERS[format].read(row)
    except _ColumnError as missing:
        fix = f"set {fitting}" if (fitting := _fitting(row)) else _CORRECT
        raise RowError(f"format {format} needs the field {missing}, found {_listed(row)}", fix) from None
    except RowError as wrong:
        raise RowError(wrong.rule, f"{_CORRECT}, or set {fitting}" if (fitting := _fitting(row)) else _CORRECT) from None


def missing_format_error(row: object) -> RowError:
    """The error for a file whose format nobody named: its columns and what they fit."""
    if not isinstance(row, Mapping):
        return RowError(f"must be a JSON object, not {type(row).__name__}")
    fitting = _fitting(row) or f"format to one of {', '.join(_READERS)}, and name the fields as it does"
    return RowError(f"needs a format; its fields are {_listed(row)}", f"set {fitting}")


class _ColumnError(Exception):
    pass


@dataclass(frozen=True)
class _Reader:
    """Columns by what they hold, the preferred one first, and how a column's text gives the gold."""

    question: tuple[str, ...]
    answer: Mapping[str, Callable[[str, str], str]]
    level: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.question, *self.answer, *self.level)

    def read(self, row: Mapping[str, Any]) -> ProblemRow:
        question = _text(row, _present(row, self.question))
        if not question.strip():
            raise RowError(f"the field {_present(row, self.question)} is empty")
        _present(row, self.answer)
        filled = next((name for name in self.answer if not _is_blank(row.get(name))), None)
        gold = self.answer[filled](filled, _text(row, filled, integers=True)) if filled else ""
        return ProblemRow(question, gold, next((_level(row[name]) for name in self.level if name in row), 0))


def _present(row: Mapping[str, Any], names: Iterable[str]) -> str:
    """The first of `names` that the row has."""
    found = next((name for name in names if name in row), None)
    if found is None:
        raise _ColumnError(" or ".join(names))
    return found


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _text(row: Mapping[str, Any], name: str, integers: bool = False) -> str:
    """The column as text, where `integers` may stand for it. Raises RowError for other types and for what no tokenizer can encode."""
    value = row[name]
    if integers and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise RowError(f"the field {name} must be a string, not {type(value).__name__}")
    if any("\ud800" <= character <= "\udfff" for character in value):  # JSON can escape a lone surrogate
        raise RowError(f"the field {name} holds a lone surrogate")
    return value


def _level(value: object) -> int:
    """`5`, `"Level 5"` and `5.5` are 5; 0 for what is no level, such as null, `"Level ?"` and -1."""
    match = _LEVEL.fullmatch(str(value))
    return int(match[1]) if match else 0


def _as_it_is(column: str, text: str) -> str:
    return text.strip()


def _after(marker: str) -> Callable[[str, str], str]:
    alone = re.compile(rf"(?<!#){marker}(?!#)")

    def gold(column: str, text: str) -> str:
        found = list(alone.finditer(text))
        if not found:
            raise RowError(f"the field {column} has no {marker} before the gold answer")
        number = text[found[-1].end() :].strip()
        return number.replace(",", "") if _GROUPED_NUMBER.fullmatch(number) else number

    return gold


def _boxed(column: str, text: str) -> str:
    r"""The last `\boxed{...}`; `\fbox{...}` and `\boxed 5` occur too."""
    text = text.replace(r"\fbox", r"\boxed")
    if (found := last_boxed(text)) is not None:
        return found.strip()
    if bare := re.findall(r"\\boxed\s+([^\s$.,]+)", text):
        return str(bare[-1])
    raise RowError(rf"the field {column} has no \boxed{{}} with the gold answer")


def _up_to_three_digits(column: str, text: str) -> str:
    match = _AIME_ANSWER.fullmatch(text.strip())
    if not match:
        raise RowError(f"the field {column} must hold an integer from 0 to 999, not {text.strip()[:40]!r}")
    return str(int(match[1]))


_READERS: dict[FormatName, _Reader] = {
    "gsm8k": _Reader(("question",), {"answer": _after("####")}),
    "arithmetic": _Reader(("question",), {"answer": _after("#")}),
    "math": _Reader(("problem",), {"answer": _as_it_is, "solution": _boxed}, ("level", "difficulty")),
    "deepmath": _Reader(("question", "prompt"), {"final_answer": _as_it_is, "ground_truth": _as_it_is}, ("difficulty",)),
    "aime": _Reader(
        ("problem", "Problem", "question"),
        {"answer": _up_to_three_digits, "Answer": _up_to_three_digits, "expected_answer": _up_to_three_digits},
    ),
}


KNOWN_COLUMNS = frozenset(column for reader in _READERS.values() for column in reader.columns)
"""Every column that some format reads."""


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"


def _fitting(row: Mapping[str, Any]) -> str:
    """The formats that read this row to the end; empty where none does."""
    fitting = []
    for name, reader in _READERS.items():
        try:
            if reader.read(row).gold:
                fitting.append(f'format = "{name}"')
        except (RowError, _ColumnError):
            continue
    return " or ".join(fitting)
