r"""Reads answers that are not formulas: each spelling of an answer has the same keys, and no arithmetic is done on them.

choices    {A, C}        "AC", "A, C", "(A) and (C)", "(C) 72"
dates      2024-01-02    "January 2, 2024", "2nd of January 2024", "2024/1/2"; 01/02/2024 has two readings and equals only itself
times      seconds       "2:30", "2 h 30 min", "150 minutes"; "2:30 PM" is "14:30"
ratios     3:2           "6 : 4", "3 to 2", 3/2
labels     555-1234      scores, seasons, phone numbers, ISBNs, versions, addresses, and digits in a base ("101_2")
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction

from megatron_rl.rewards.numbers import parse_number
from megatron_rl.rewards.statements import CLAUSE_END

_SPACES = re.compile(r"\\[,;: ]|\\q?quad\b|~|\s+")
_CJK_END = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af\s.]+$")
_APART = r"(?:[^\w/?|<>=+*^-]|\b(?:and|[Bb]oth|only|are|correct)\b|[和与及])"
_LETTERS = re.compile(rf"{_APART}*[A-J](?:{_APART}*[A-J])*{_APART}*")
_LABELED = re.compile(r"\(([A-J])\)|^\W*([A-J])(?:[).:](?=\s|$)|\s+\()")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore)\b,?\s*)?(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)s?\s*(?:is|are|:)?\s*)*|选项", re.I
)
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_MONTH = rf"({'|'.join(_MONTHS)})(?:uary|ruary|ch|il|e|y|ust|t|tember|ober|ember)?\b\.?"
_DATE = re.compile(
    r"(?<![\w./:-])(?:([0-9]{4})[-/.年]([0-9]{1,2})[-/.月]([0-9]{1,2})(?:日|(?![-./:]?\w))"
    r"|([0-9]{1,2})[-/.]([0-9]{1,2})[-/.]([0-9]{4}|[0-9]{2})(?![-./:]?\w)"
    rf"|(?:([0-9]{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?)?{_MONTH}(?:\s*([0-9]{{1,2}})(?:st|nd|rd|th)?(?![\w:]))?(?:,?\s+([0-9]{{4}})\b)?)",
    re.I,
)
_NO_DATE = re.compile(r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s*|\bthe\s+", re.I)
_CLOCK = re.compile(r"(?<![\w:.])([0-9]{1,2})(?:\s*([ap]m)\b|:([0-5][0-9])(?::([0-5][0-9]))?(?![\w:])\s*([ap]m\b)?)", re.I)
_PART = (
    r"([0-9]+(?:\.[0-9]+|\s+[0-9]/[0-9]|\s*\\[dt]?frac\{?[0-9]\}?\{?[0-9]\}?)?)"
    r"[\s-]*(h(?:ou)?rs?|h|min(?:ute)?s?|s(?:ec(?:ond)?s?)?|小时|分钟?|秒)(?![a-z])"
)
_DURATION = re.compile(rf"(?<![\w.]){_PART}(?:(?:\s|,|and)*{_PART})*", re.I)
_SECONDS = {"h": 3600, "小": 3600, "m": 60, "分": 60, "s": 1, "秒": 1}
_RATIO = re.compile(r"(?<![\w.:/])[0-9]+(?:\s*(?::|\bto\b)\s*[0-9]+)+(?![\w:/]|[.][0-9])")
_LABEL = re.compile(
    r"(?<![\w.+-])(?:\(?\+?[0-9]+\)?(?:[ -]\(?[0-9]+\)?)*-[0-9X]+|v?[0-9]+(?:\.[0-9]+){2,}|[A-F]*[0-9][0-9A-F]*_[0-9]+)(?![\w-]|[.:/]\w)"
)

Keys = frozenset[object]
"""What a text says of one kind; empty if it says nothing."""


def plain(content: str) -> str:
    r"""Return a text without emphasis and commands of spaces: `2\,h 30\,min` is "2 h 30 min"."""
    return _SPACES.sub(" ", re.sub(r"\*\*|\$|\\!", "", content)).strip(" .,;*`\"'")


def read_choices(content: str) -> Keys:
    """Return the letters of the choices that a text names."""
    content = CLAUSE_END.split(_LEAD.sub("", _CJK_END.sub("", content), count=1), maxsplit=1)[0]
    if _LETTERS.fullmatch(content):
        return frozenset(re.findall("[A-J]", content))
    return frozenset(letter for match in _LABELED.findall(content) for letter in match if letter)


def _read_order(content: str) -> Keys:
    return frozenset({"".join(re.findall("[A-J]", content))} if _LETTERS.fullmatch(content) else ())


def read_dates(content: str) -> Keys:
    """Return the dates in a text as (year, month, day), with 0 for what it leaves out."""
    keys = set[object]()
    for match in _DATE.finditer(_NO_DATE.sub("", content)):
        year, month, day, first, second, end, before, name, after, last = match.groups()
        if name:
            key = (int(last or 0), _MONTHS.index(name.lower()) + 1, int(before or after or 0))
        elif first:
            orders = {(int(end), m, d) for m, d in ((int(first), int(second)), (int(second), int(first))) if m <= 12 and len(end) == 4}
            key = orders.pop() if len(orders) == 1 else (int(first), int(second), int(end))
        else:
            key = (int(year), int(month), int(day))
        keys.add(key)
    return frozenset(keys)


def read_times(content: str) -> Keys:
    """Return the times of day and the durations in a text, in seconds."""
    keys = set[object]()
    for duration in _DURATION.finditer(content):
        parts = [(parse_number(amount), unit) for amount, unit in re.findall(_PART, duration[0], re.I)]
        keys.add(sum(number.value * _SECONDS[unit[0].lower()] for number, unit in parts if number))
    for hour, bare_half, minutes, seconds, half in _CLOCK.findall(_DURATION.sub("", content)):
        noon = 12 * ((half or bare_half).lower() == "pm")
        keys.add(Fraction(3600 * (int(hour) % 12 + noon if half or bare_half else int(hour)) + 60 * int(minutes or 0) + int(seconds or 0)))
    return frozenset(keys)


def _read_ratios(content: str) -> Keys:
    """Return the ratios in a text in lowest terms."""
    ratios = [[int(term) for term in re.findall("[0-9]+", ratio)] for ratio in _RATIO.findall(content)]
    if not ratios and (number := parse_number(content)) and not number.unit:
        ratios = [[number.value.numerator, number.value.denominator]]
    return frozenset(":".join(str(term // (math.gcd(*terms) or 1)) for term in terms) for terms in ratios)


def _read_labels(content: str) -> Keys:
    """Return the labels in a text. Separators do not matter in phone numbers and ISBNs, and a season may abbreviate its second year."""
    content = re.sub(r"[\s,(]*(?:in\s+)?base[\s-]+(\w+)\)?|_\{?\(?(\w+)\)?\}?", lambda match: f"_{match[1] or match[2]}", content)
    content = re.sub(r"_([a-z]+)", lambda match: f"_{number.value}" if (number := parse_number(match[1])) else match[0], content)
    content = re.sub(r"(?<=[0-9])(?:\s*(?:--?|[–—]|\bto\b)\s*|(?<=\b[12][0-9]{3})/(?=[0-9]{2}\b))(?=[0-9])", "-", content)
    labels = [re.sub(r"[\sv()]", "", label) for label in _LABEL.findall(content.replace(")_", "_"))]
    labels = [re.sub(r"^([0-9]{2})([0-9]{2}-)([0-9]{2})$", r"\1\2\1\3", label) for label in labels or re.findall("^[0-9]{7,}X?$", content)]
    return frozenset(re.sub(r"[+-]", "", label) if sum(map(str.isdigit, label)) > 6 and "." not in label else label for label in labels)


def find_kind(gold: str) -> Callable[[str], Keys] | None:
    """Return the reader of the kind of a plain gold answer, or None for numbers, words, and formulas."""
    packed = re.fullmatch("[A-J]+", gold)
    if _LETTERS.fullmatch(gold) and (not packed or [*gold] == sorted({*gold})):
        letters = re.findall("[A-J]", gold)
        return read_choices if letters == sorted(letters) or len(letters) < 3 else _read_order
    date, parts = _DATE.fullmatch(_NO_DATE.sub("", gold)), re.findall(_PART, gold, re.I)
    if date and (date[8] is None or date[7] or date[9] or date[10]) and 1 <= int(date[2] or 1) <= 12:
        return read_dates
    if _CLOCK.fullmatch(gold) or (len(parts) > 1 and _DURATION.fullmatch(gold)):
        return read_times
    if _RATIO.fullmatch(gold):
        return _read_ratios
    return _read_labels if all(map(_LABEL.fullmatch, re.split(r"[,;]\s*", re.sub("[{}]", "", gold)))) else None
