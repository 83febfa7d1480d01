"""Problems from a JSONL file: one JSON object per line with `question` and `answer`, the shape in which GSM8K is published.

`answer` is a worked solution that ends in a marker and the gold answer: `#### 1,080` for format `gsm8k`, `#62` for format
`arithmetic`. Every fault stops the run before it starts and names the file, the line and what is wrong with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal

from megatron_rl.errors import UserError
from megatron_rl.types import Problem

MARKERS = {"gsm8k": "####", "arithmetic": "#"}
_GROUPED_NUMBER = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")


class _LineError(ValueError):
    """What is wrong with a line; becomes a UserError once the file and line number are known."""


def read_jsonl(path: Path, data_format: Literal["gsm8k", "arithmetic"], field: str) -> list[Problem]:
    """The problems of a JSONL file in file order; `prompt` is the bare question. Blank lines are skipped.

    `field` is the configuration field that named the file. Raises UserError for a missing or unreadable file, a malformed line
    (with its number), and a file without problems.
    """
    problems = []
    for number, line in enumerate(_read_bytes(path, field).split(b"\n"), start=1):
        try:
            if text := _decode(line).strip():
                problems.append(_problem(text, path, number, MARKERS[data_format]))
        except _LineError as wrong:
            raise UserError(field, f"{path}:{number}", str(wrong), "correct or remove this line") from None
    if not problems:
        raise UserError(field, str(path), "holds no problems", "give a JSONL file with question and answer on every line")
    return problems


def _read_bytes(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        reason = "is a folder" if path.is_dir() else "does not exist" if not path.exists() else f"cannot be read ({error.strerror})"
        raise UserError(field, str(path), reason, "give the path of a JSONL file, or arithmetic for generated problems") from None


def _decode(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _LineError(f"is not UTF-8 (byte {error.start + 1} of the line)") from None


def _problem(text: str, path: Path, number: int, marker: str) -> Problem:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _LineError(f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _LineError(f"must be a JSON object, not {type(row).__name__}")
    question, solution = _text_field(row, "question"), _text_field(row, "answer")
    _, found, gold = solution.rpartition(marker)
    if not found:
        raise _LineError(f"the field answer has no {marker} before the gold answer")
    gold = _without_thousands_separators(gold.strip())
    if not gold:
        raise _LineError(f"the gold answer after {marker} is empty")
    source = f"{path.absolute().parent.name}/{path.stem}"
    return Problem(f"{source}:{number}", question, gold, source=source)


def _text_field(row: dict[str, object], name: str) -> str:
    if name not in row:
        raise _LineError(f"the field {name} is missing")
    value = row[name]
    if not isinstance(value, str):
        raise _LineError(f"the field {name} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise _LineError(f"the field {name} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):  # JSON can escape what no tokenizer can encode
        raise _LineError(f"the field {name} holds a lone surrogate")
    return value


def _without_thousands_separators(gold: str) -> str:
    return gold.replace(",", "") if _GROUPED_NUMBER.fullmatch(gold) else gold
