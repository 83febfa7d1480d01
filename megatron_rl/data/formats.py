r"""Formats of published data sets: their columns, and how the gold answer is written.

    gsm8k       question, answer: a worked solution that ends in `#### 1,080`
    math        problem, answer; or problem, solution with the answer in its last `\boxed{}`; level or difficulty
    deepmath    question, final_answer, difficulty; or prompt, ground_truth, difficulty
    aime        problem or question, answer or expected_answer: an integer from 0 to 999
    verl        prompt (messages), reward_model.ground_truth; the module `verl` reads it

Other columns only reach judges (`Problem.columns`). A row has no gold answer if its answer is null or blank, which occurs in published
files. A custom format is a function from a row to a `ProblemRow` (`RowReader`). Rows that differ only in the names of their columns need
no format (`data.columns`).
"""

import contextlib
import copy
import json
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import partial
from typing import Any, Protocol

from megatron_rl.plugs import DATA_FORMATS
from megatron_rl.rewards.statements import last_boxed
from megatron_rl.types import ChatMessage, as_json
from megatron_rl.workers import plain
from parallel.plug import describe_error

_GROUPED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_LEVEL = re.compile(r"(?:Level )?([0-9]+)(?:\.[0-9]+)?")
_AIME_ANSWER = re.compile(r"\$?([0-9]{1,3})(?:\^\{?\\circ\}?)?\$?")  # one answer of 2025 is published as 336^\circ
_HASHES = re.compile("(?<!#)####(?!#)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CORRECT = "correct or remove this row"
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -1000, 308
_EXACT_CHARACTERS = 16  # a float holds any number of 15 digits and a point


class RowError(ValueError):
    """Raised for a malformed row. It becomes a UserError with the file and the row's number."""

    def __init__(self, rule: str, fix: str = _CORRECT) -> None:
        self.rule, self.fix = rule, fix
        super().__init__(rule)


def check_columns(columns: Mapping[str, Any]) -> None:
    """Raise RowError, naming the column, for a value that would not reach a reward function as it is."""
    for name, value in columns.items():
        try:
            if not isinstance(value, str | int | float | None):
                plain.dump(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(f"has a column that is not data ({name}: {error})", "leave it out by data.keep_columns") from None


@dataclass(frozen=True)
class ProblemRow:
    """The contents of a row."""

    question: str
    gold: str  # empty if the row has no answer
    level: int = 0  # 0 if the row has no level
    history: tuple[ChatMessage, ...] = ()  # messages before the question
    tools: tuple[Mapping[str, Any], ...] = ()
    """[{"type": "function", "function": {name, description, parameters}}], the form of chat templates."""
    pass_rate: float | None = None  # fraction of correct answers, from 0 to 1, or None if unknown


class RowReader(Protocol):
    """A format. It takes a row with all columns and raises RowError if the row is malformed."""

    def __call__(self, row: Mapping[str, Any]) -> ProblemRow: ...


def read_row(row: object, format: str | None, read: RowReader | None) -> ProblemRow:
    """Return the contents of a decoded row. `read`: reader of `format`, or None without a format.

    Raise RowError, with the columns found and the matching formats, if the row does not match the format or there is no format.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"must be a JSON object, not {type(row).__name__}")
    if read is None:
        example = 'columns to the names of question and answer, e.g. columns = {question = "prompt", answer = "target"}'
        raise RowError(f"needs a format; its fields are {_list_columns(row)}", f"set {_find_formats(row) or example}")
    try:
        return _read_own(row, read) if format is not None and DATA_FORMATS.is_own(format) else _check_row(read(row))
    except ColumnError as missing:
        fix = f"set {formats}" if (formats := _find_formats(row)) else _CORRECT
        raise RowError(f"format {format} needs the field {missing}, found {_list_columns(row)}", fix) from None
    except RowError as error:
        formats = _find_formats(row) if error.fix == _CORRECT else ""
        raise RowError(error.rule, f"{error.fix}, or set {formats}" if formats else error.fix) from None
    except Exception as error:
        if format in DATA_FORMATS.builtin:
            raise
        raise RowError(f"format {format} fails ({describe_error(error)})") from None


def _read_own(row: Mapping[str, Any], read: RowReader) -> ProblemRow:
    """Return what a format of the user's own makes of a copy of a row."""
    result = _check_row(read(copy.deepcopy(row)))
    f"{result.question}{result.gold}".encode()  # raises here for a lone surrogate, not in the tokenizer
    return result


def _check_row(result: ProblemRow) -> ProblemRow:
    """Return the row. Raise TypeError if it is something else, or has a field of another type."""
    if not isinstance(result, ProblemRow) or not isinstance(result.question, str) or not isinstance(result.gold, str):
        raise TypeError(f"it returned {result!r:.80}, not a ProblemRow with text fields")
    if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in result.history):
        raise TypeError(f"history = {result.history!r:.80}, not messages with role and content")
    if not isinstance(result.level, int):
        raise TypeError(f"level = {result.level!r:.40}, not an integer")
    if result.pass_rate is not None and not 0 <= result.pass_rate <= 1:
        raise TypeError(f"pass_rate = {result.pass_rate!r:.40}, not from 0 to 1")
    return result


class ColumnError(Exception):
    """Raised with the name if a row does not have a column that a built-in format needs."""


@dataclass(frozen=True)
class _Reader:
    """A built-in format. Names are in order of preference; `answer` maps columns to functions that extract the gold answer."""

    question: tuple[str, ...]
    answer: Mapping[str, Callable[[str, str], str]]
    level: tuple[str, ...] = ()

    def __call__(self, row: Mapping[str, Any]) -> ProblemRow:
        question_column = _find_column(row, self.question)
        question = read_text(row[question_column], question_column)
        if not question.strip():
            raise RowError(f"the field {question_column} is empty")
        _find_column(row, self.answer)
        answer_column = next((name for name in self.answer if not is_blank(row.get(name))), None)
        gold = ""
        if answer_column:
            gold = self.answer[answer_column](answer_column, read_answer(row[answer_column], answer_column))
        return ProblemRow(question, gold, next((parse_level(row[name]) for name in self.level if name in row), 0))


def _find_column(row: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the first of `names` that the row has. Raise ColumnError if it has none."""
    for name in names:
        if name in row:
            return name
    raise ColumnError(" or ".join(names))


def parse_json(text: str, subject: str = "") -> Any:
    """Return the value of a JSON text. Raise RowError if it is invalid or names a field twice; `subject` begins the message."""
    try:
        return json.loads(text, parse_float=_parse_float, object_pairs_hook=partial(_make_object, subject))
    except RowError:
        raise
    except (ValueError, RecursionError) as error:
        raise RowError(f"{subject}is not JSON ({error})") from None


def _make_object(subject: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise RowError(f"{subject}has the field {next(name for name in names if names.count(name) > 1)} twice")
    return result


class _WrittenFloat(float):
    """A number that a float may not hold exactly, which keeps its text."""

    text: str


def _parse_float(text: str) -> float:
    if len(text) <= _EXACT_CHARACTERS and "e" not in text.lower():
        return float(text)
    number = _WrittenFloat(text)
    number.text = text
    return number


def is_blank(value: Any) -> bool:
    """Return whether a value is null or a blank string."""
    return value is None or (isinstance(value, str) and not value.strip())


def read_text(value: Any, name: str) -> str:
    """Return the string in the field `name`. Raise RowError for other types, and for text that no tokenizer can encode."""
    if not isinstance(value, str):
        raise RowError(f"the field {name} must be a string, not {type(value).__name__}")
    if _SURROGATE.search(value):  # JSON escapes can produce lone surrogates
        raise RowError(f"the field {name} contains a lone surrogate")
    return value


def read_answer(value: Any, name: str, structured: bool = False) -> str:
    """Return the gold answer in the field `name` as a string.

    Integers, and floats without a fraction, become integers: pandas turns an integer column with a null into floats. Other floats become
    decimals without an exponent, and keep every digit of the file. With `structured`, a list or an object becomes its JSON text.

    Raises:
        RowError: The value is NaN, infinite, larger than any float, of another type, or a text that no tokenizer can encode.
    """
    if isinstance(value, numbers.Real | Decimal) and not isinstance(value, bool | Fraction):
        text = getattr(value, "text", None) or str(value)
        try:
            number = Decimal(text)
        except InvalidOperation:  # an exponent of twenty digits
            number = Decimal("nan")
        if not number.is_finite() or (number and not _SMALLEST_EXPONENT <= number.adjusted() <= _LARGEST_EXPONENT):
            raise RowError(f"the field {name} must be a finite number, not {text:.40}")
        return str(int(number)) if number == number.to_integral_value() else f"{number:f}".rstrip("0")
    if structured and isinstance(value, list | Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False, default=as_json)
        except (TypeError, ValueError) as error:
            raise RowError(f"the field {name} must hold JSON values ({error})") from None
    return read_text(value, name)


def read_pass_rate(value: object, name: str) -> float | None:
    """Return a number from 0 to 1, or None for null. Raise RowError for other values."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RowError(f"the field {name} must be a number from 0 to 1, or null, not {value!r:.40}")
    return float(value)


def parse_level(value: object) -> int:
    """Return 5 for `5`, `"Level 5"` and `5.5`, and 0 for values that are not a level, such as null, `"Level ?"` and -1."""
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
    r"""Return the content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 5`."""
    text = text.replace(r"\fbox", r"\boxed")
    if (content := last_boxed(text)) is not None:
        return content.strip()
    if bare := re.findall(r"\\boxed\s+([^\s$.,]+)", text):
        return str(bare[-1])
    raise RowError(rf"the field {column} has no \boxed{{}} with the gold answer")


def _up_to_three_digits(column: str, text: str) -> str:
    match = _AIME_ANSWER.fullmatch(text.strip())
    if not match:
        raise RowError(f"the field {column} must be an integer from 0 to 999, not {text.strip()[:40]!r}")
    return str(int(match[1]))


gsm8k = _Reader(("question",), {"answer": _after_hashes})
math = _Reader(("problem",), {"answer": _strip, "solution": _boxed}, ("level", "difficulty"))
deepmath = _Reader(("question", "prompt"), {"final_answer": _strip, "ground_truth": _strip}, ("difficulty",))
aime = _Reader(
    ("problem", "Problem", "question"),
    {"answer": _up_to_three_digits, "Answer": _up_to_three_digits, "expected_answer": _up_to_three_digits},
)


def _list_columns(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"


def _find_formats(row: Mapping[str, Any]) -> str:
    """Return the settings of the built-in formats that can read this row, or "" if none can."""
    formats = []
    for name in DATA_FORMATS.builtin:
        with contextlib.suppress(RowError, ColumnError):
            if DATA_FORMATS.load(name)(row).gold:
                formats.append(f'format = "{name}"')
    return " or ".join(formats)
