r"""Reads values in the notations of answers. No arithmetic is done on kinds other than numbers; each spelling has the same keys.

numbers    3/4           1,080  2.50  \frac{3}{4}  1\frac{1}{2}  2\times 10^{-5}  2e-05  60 km  20\%
choices    {A, C}        "AC", "A, C", "(A) and (C)", "(C) 72"
dates      2024-01-02    "January 2, 2024", "2nd of January 2024", "2024/1/2"; 01/02/2024 has two readings and equals only itself
times      seconds       "2:30", "2 h 30 min", "150 minutes"; "2:30 PM" is "14:30"
ratios     3:2           "6 : 4", "3 to 2", 3/2
labels     555-1234      scores, seasons, phone numbers, ISBNs, versions, addresses, and digits in a base ("101_2")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from megatron_rl.rewards.statements import CLAUSE_END

_SEPARATOR = r"(?:,|\{,\}|\\[,:; ]|\\! ?)"
_GROUPED = rf"[0-9]{{1,3}}(?:(?:{_SEPARATOR}{{1,2}}[0-9]{{3}})+|(?: [0-9]{{3}})+)|[0-9]{{1,2}}(?:,[0-9]{{2}})+,[0-9]{{3}}"  # 12,34,567 too
_INTEGER = rf"(?:(?:{_GROUPED})(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?\.?|\.[0-9]+)"
_POWER = r"(?:\s*(?:\\times|\\cdot|×|·|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*(?P<power>[-+]?[0-9]+)\s*\}?|[eE](?P<e>[-+]?[0-9]+))"
_FRACTION = r"(?:\\[dtc]?frac\s*\{\s*)?(?P<top>-?[0-9]+)\s*(?:\}\s*\{|/)\s*(?P<bottom>[0-9]+)(?:\s*\}|(?![0-9.,]?[0-9/}]))"
NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?:US|CA|AU|HK)?\\?[$€£¥₹]|Rs\.?)?\s*(?:(?:(?P<whole>[0-9]+)(?:\s*(?=\\)|\s+))?(?:{_FRACTION})|(?P<decimal>{_DECIMAL})(?:{_POWER})?)"
)
_BARE_POWER = re.compile(r"^([-+]?\s*)10\s*(\^|\*\*)")
_PERCENT = re.compile(r"\\?%|\s*per\s?cent\b", re.IGNORECASE)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12, "万": 10**4, "亿": 10**8}
_SCALE = re.compile(rf"\s*({'|'.join(_SCALES)})s?(?![a-z])", re.IGNORECASE)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\(?:circ|degree)\s*\}?|°|\\degree)")
_NO_UNIT = re.compile(
    r"\b(?:or|not|is|are|isn't|than|at|but|if|minus|plus|times|over|squared|cubed|factorial|mod|to)\b|[0-9?=<>≠≤≥±]", re.I
)
_UNIT = re.compile(r"(?:[^\W\d_]{2,}|(?<![^\W\d_])[mshgLlNJWVAKCFt])(?:[\s/.\-^{}'·*]|[^\W\d_])*")
_UNITS = """m meter metre|km kilometer kilometre|cm centimeter centimetre|mm millimeter millimetre|in inch inche|ft foot feet
yd yard|mi mile|g gram|kg kilogram kilo|mg milligram|lb lbs pound|oz ounce|t ton tonne|l liter litre|ml milliliter millilitre|gal gallon
s sec second|min minute|h hr hour|n newton|j joule|w watt|pa pascal|v volt|a amp ampere|hz hertz|mol mole|k kelvin|c celsius|f fahrenheit
/ per|^2 square sq|^3 cubic cu|km/h kph kmph kmh|mi/h mph"""
_UNIT_NAMES = {name: names.split()[0] for names in re.split(r"[|\n]", _UNITS) for name in names.split()} | {"degree": ""}
_ONES = "zero|one|two|three|four|five|six|seven|eight|nine"
_TEENS = "ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_IN_WORDS = dict(zip(f"{_ONES}|{_TEENS}|{_TENS}".split("|"), [*range(20), *range(20, 100, 10)], strict=True))
_WORDS = re.compile(rf"(?:({_TENS})[\s-]+(?={_ONES}))?({'|'.join(_IN_WORDS)})(?=(?:\s+[^\W\d_]+)?[\s.]*$)", re.IGNORECASE)
_PART_BEFORE = re.compile(
    r"(?i)[0-9A-Za-z\\]$|(?:[-+*/^_×÷·√(\[{≤≥≠]|\w\s+[<>]|\\[a-z]+|\b(?:sqrt|log|ln|than|least|most|to|over|under|below|above|vs|step|question|problem"
    r"|exercise|example|chapter|section|page|part|case|number|no|twice|double|triple|half|half\s+of|almost|nearly|mod|modulo|times|plus"
    r"|minus|choose)|[0-9](?:\s*(?:[,:]|and|,\s*and)|\s))\s*\$?\s*$"
)
_PART_AFTER = re.compile(
    r"(?i)\s*(?:[-+*^_×÷·<>({\[\\]|/(?![a-z]{2})|:[0-9]|(?:,|and\b)\s*[-$\\(]*[0-9]|[A-Za-z](?![A-Za-z])(?<!a)"
    r"|(?:pi|sqrt|mod|modulo|choose|factorial|squared|cubed)\b|(?:plus|minus|times)\s+[-$\\(]*(?:[0-9]|[b-z]\b))|(?:st|nd|rd|th)\b|[A-Za-z](?![A-Za-z])|[0-9]"
    r"|\s+(?:is|are|was)(?:n't|\s+(?:not|wrong|incorrect|impossible|false|too)\b)"
)
_UNSOLVED = re.compile(r"[-+*/^0-9}]\s*[a-z]\s*$")  # "3x = 42"
_NEGATED = re.compile(
    r"(?i)(?:不是|并非)\s*$|(?:\b(?:not|no way|never|cannot|but|except|instead of|rather than|nicht|pas|не)|n't|≠)\W+(?:\w+\W+){0,3}$"
)


class Number(NamedTuple):
    """An exact number with its unit. `exact` is False for decimals that may be rounded."""

    value: Fraction
    unit: str = ""  # "%" or the unit in lowercase, without spaces and plural s
    exact: bool = True

    def equals(self, gold: Number) -> bool:
        """Return whether the numbers are equal. A missing unit is equal to every unit, and 20 % equals 20 and 0.2. Six digits are equal to
        the fraction without finite decimals that they represent, and decimals may differ by a rounding error of a float."""
        if self.unit and gold.unit and self.unit != gold.unit:
            return False
        factor = Fraction(100) ** ((gold.unit == "%") - (self.unit == "%"))
        endless = any(pow(10, value.denominator.bit_length(), value.denominator) for value in (self.value, gold.value))
        tolerance = Fraction(1, 10**6) if endless and self.exact != gold.exact else Fraction(0 if self.exact or gold.exact else 1, 10**14)
        values = {self.value, self.value * factor}
        return any(abs(value - gold.value) <= tolerance * max(abs(value), abs(gold.value)) for value in values)


def parse_number(text: str) -> Number | None:
    """Return the number that `text` consists of, with at most a unit after it, or None. An absurd power of ten is no number."""
    text = _BARE_POWER.sub(r"\g<1>1*10\2", text.strip()).strip()
    if words := _WORDS.match(text):
        text = str(sum(_IN_WORDS.get(word.lower(), 0) for word in words.groups(""))) + text[words.end() :]
    if (match := NUMBER.match(text)) is None:
        return None
    whole, top, bottom, power = (int(match[part] or 0) for part in ("whole", "top", "bottom", "power"))
    decimal, power, rest = match["decimal"], power or int(match["e"] or 0), text[match.end() :]
    if abs(power) > 1000 or (decimal is None and not bottom):
        return None
    digits = re.sub(r"[^0-9.]", "", decimal or "").rstrip(".")
    value = whole + Fraction(top, bottom) if decimal is None else Fraction(digits) * Fraction(10) ** power
    value, exact = -value if match["sign"] == "-" else value, "." not in digits
    if (percent := _PERCENT.match(rest)) and not rest[percent.end() :].strip(" .$*"):
        return Number(value, "%", exact)
    if scale := _SCALE.match(rest):
        value, rest = value * _SCALES[scale[1].lower()], rest[scale.end() :]
    unit = _read_unit(rest)
    return None if unit is None else Number(value, unit, exact)


def _read_unit(rest: str) -> str | None:
    """Return the unit in the text after a number, "" if there is none, or None if the text is something else."""
    rest = re.sub(r"\\[,;:! ]|~|\\left|\\right", " ", _DEGREES.sub("", rest, count=1)).strip(" .,;:*$€£¥₹`\n\t")
    bare = re.sub(r"\^\s*\{?[-0-9]+\}?", "", rest)
    if len(rest) > 60 or _NO_UNIT.search(bare):
        return None
    if rest and not _UNIT.fullmatch(bare) and not re.fullmatch(r"[\u4e00-\u9fff\u3040-\u30ff\uac00-\ud7a3]{1,6}", bare):
        return None
    singular = re.sub(r"(?<=[^\W\d_]{3})(?<!celsiu)s\b", "", rest.casefold())
    words = re.sub(r"[^\W\d_]+", lambda word: _UNIT_NAMES.get(word[0], word[0]), singular)
    words = re.sub(r"(\^[23])\W+(\w+)", r"\2\1", words)  # square meters
    return re.sub(r"[\s{}.·*]", "", re.sub(r"\s*\b(\w+)\^\{?-1\}?", r"/\1", words))


def last_number(sentence: str) -> str | None:
    """Return the number that a sentence of words ends with, or the right-hand side of its last equation. Return None if the number is part
    of an expression or of a list, or is negated."""
    sentence = re.sub(r"(?<=\w)\s+\([^()]*[-+*/×÷=][^()]*\)\W*$", "", sentence)  # "42 apples (40 + 2)"
    sentence = re.sub(r"(?<=[ckdmf][mt]|in)\^\{?[23]\}?", "", sentence)  # units of area and volume
    left, equals, sentence = sentence.rpartition("=")
    matches = [*NUMBER.finditer(sentence)]
    if not matches or _UNSOLVED.search(left):
        return None
    last = matches[0 if equals else -1]
    before, after = sentence[: last.end() - len(last[0].lstrip())], sentence[last.end() :]
    is_difference = last["sign"] and re.search(r"(?:[0-9)}\]]\s*|\w|\b[A-Za-z]\s+)$", before)
    return None if is_difference or _PART_BEFORE.search(before) or _PART_AFTER.match(after) or _NEGATED.search(before) else last[0]


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
    r"(?i)(?<![\w./:-])(?:([0-9]{4})[-/.年]([0-9]{1,2})[-/.月]([0-9]{1,2})(?:日|(?![-./:]?\w))"
    r"|([0-9]{1,2})[-/.]([0-9]{1,2})[-/.]([0-9]{4}|[0-9]{2})(?![-./:]?\w)"
    rf"|(?:([0-9]{{1,2}})(?:st|nd|rd|th)?\s+(?:of\s+)?)?{_MONTH}(?:\s*([0-9]{{1,2}})(?:st|nd|rd|th)?(?![\w:]))?(?:,?\s+([0-9]{{4}})\b)?)"
)
_NO_DATE = re.compile(r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s*|\bthe\s+", re.I)
_CLOCK = re.compile(r"(?<![\w:.])([0-9]{1,2})(?:\s*([ap]m)\b|:([0-5][0-9])(?::([0-5][0-9]))?(?![\w:])\s*([ap]m\b)?)", re.I)
_PART = (
    r"([0-9]+(?:\.[0-9]+|\s+[0-9]/[0-9]|\s*\\[dt]?frac\{?[0-9]\}?\{?[0-9]\}?)?)"
    r"[\s-]*(h(?:ou)?rs?|h|min(?:ute)?s?|s(?:ec(?:ond)?s?)?|小时|分钟?|秒)(?![a-z])"
)
_DURATION = re.compile(rf"(?<![\w.-]){_PART}(?:(?:\s|,|and)*{_PART})*", re.I)
_SECONDS = {"h": 3600, "小": 3600, "m": 60, "分": 60, "s": 1, "秒": 1}
_RATIO = re.compile(r"(?<![\w.:/-])[0-9]+(?:\s*(?::|\bto\b)\s*[0-9]+)+(?![\w:/]|[.][0-9])")
_LABEL = re.compile(
    r"(?<![\w.+-])(?:\(?\+?[0-9]+\)?(?:[ -]\(?[0-9]+\)?)*-[0-9X]+|v?[0-9]+(?:\.[0-9]+){2,}|[A-F]*[0-9][0-9A-F]*_[0-9]+)(?![\w-]|[.:/]\w)"
)

Keys = frozenset[object]  # what a text says of one kind; empty if it says nothing


def plain(content: str) -> str:
    r"""Return a text without emphasis and commands of spaces: `2\,h 30\,min` is "2 h 30 min"."""
    return _SPACES.sub(" ", re.sub(r"\*\*|\$|\\!", "", content)).strip(" .,;*`\"'")


def read_choices(content: str) -> Keys:
    """Return the letters of the choices that a text names."""
    content = CLAUSE_END.split(_LEAD.sub("", _CJK_END.sub("", content), count=1), maxsplit=1)[0]
    if _LETTERS.fullmatch(content):
        return frozenset(re.findall("[A-J]", content))
    return frozenset(letter for match in _LABELED.findall(content) for letter in match if letter)


def read_dates(content: str) -> Keys:
    """Return the dates in a text as (year, month, day), with 0 for what it leaves out."""
    keys = set[object]()
    for year, month, day, first, second, end, before, name, after, last in _DATE.findall(_NO_DATE.sub("", content)):
        if name:
            keys.add((int(last or 0), _MONTHS.index(name.lower()) + 1, int(before or after or 0)))
        elif len(end) == 4 and (first == second or (int(first) > 12) != (int(second) > 12)):  # only one of them can be the month
            keys.add((int(end), *sorted((int(first), int(second)))))
        else:
            keys.add((int(year or first), int(month or second), int(day or end)))
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
        if letters == sorted(letters) or len(letters) < 3:
            return read_choices
        return lambda content: frozenset({"".join(re.findall("[A-J]", content))} if _LETTERS.fullmatch(content) else ())  # an order
    date, parts = _DATE.fullmatch(_NO_DATE.sub("", gold)), re.findall(_PART, gold, re.I)
    if date and (date[8] is None or date[7] or date[9] or date[10]) and 1 <= int(date[2] or 1) <= 12:
        return read_dates
    if _CLOCK.fullmatch(gold) or (len(parts) > 1 and _DURATION.fullmatch(gold)):
        return read_times
    if _RATIO.fullmatch(gold):
        return _read_ratios
    return _read_labels if all(map(_LABEL.fullmatch, re.split(r"[,;]\s*", re.sub("[{}]", "", gold)))) else None
