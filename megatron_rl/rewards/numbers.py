r"""Reads numbers as they are written in answers: 1,080  -4  2.50  3/4  \frac{3}{4}  1\frac{1}{2}  2\times 10^{-5}  2e-05  60 km  20\%."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

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
_LONGEST_UNIT = 60
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


@dataclass(frozen=True)
class Number:
    """An exact number with its unit. `exact` is False for decimals that may be rounded."""

    value: Fraction
    unit: str = ""
    """"%" or the unit in lowercase, without spaces and plural s."""
    exact: bool = True

    def equals(self, gold: Number) -> bool:
        """Return whether the numbers are equal. A missing unit is equal to every unit, and 20 % equals 20 and 0.2. A decimal equals a
        fraction without finite decimals that it represents with six significant digits, and a decimal that a rounding error of a float
        separates from it."""
        if self.unit and gold.unit and self.unit != gold.unit:
            return False
        scales = {Fraction(1), Fraction(1, 100)} if (self.unit == "%") != (gold.unit == "%") else {Fraction(1)}
        values = {self.value * scale for scale in scales} if self.unit == "%" else {self.value / scale for scale in scales}
        endless = any(pow(10, value.denominator.bit_length(), value.denominator) for value in (self.value, gold.value))
        tolerance = Fraction(1, 10**6) if endless and self.exact != gold.exact else Fraction(0 if self.exact or gold.exact else 1, 10**14)
        return any(abs(value - gold.value) <= tolerance * max(abs(value), abs(gold.value)) for value in values)


def parse_number(text: str) -> Number | None:
    """Return the number that `text` consists of, with at most a unit after it, or None."""
    text = _BARE_POWER.sub(r"\g<1>1*10\2", text.strip()).strip()
    if words := _WORDS.match(text):
        text = str(sum(_IN_WORDS.get(word.lower(), 0) for word in words.groups(""))) + text[words.end() :]
    match = NUMBER.match(text)
    if match is None:
        return None
    value, rest = to_fraction(match), text[match.end() :]
    if value is None:
        return None
    exact = match["decimal"] is None or "." not in match["decimal"].rstrip(".")
    if (percent := _PERCENT.match(rest)) and not rest[percent.end() :].strip(" .$*"):
        return Number(value, "%", exact)
    if scale := _SCALE.match(rest):
        value, rest = value * _SCALES[scale[1].lower()], rest[scale.end() :]
    unit = _read_unit(rest)
    return None if unit is None else Number(value, unit, exact)


def to_fraction(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of `NUMBER`, or None if its exponent is absurd or its denominator is 0."""
    sign = -1 if match["sign"] == "-" else 1
    if match["decimal"] is not None:
        power = int(match["power"] or match["e"] or 0)
        if abs(power) > 1000:
            return None
        plain = re.sub(r"[^0-9.]", "", match["decimal"]).rstrip(".")
        return sign * Fraction(plain) * Fraction(10) ** power
    whole, top, bottom = (int(match[part] or 0) for part in ("whole", "top", "bottom"))
    return sign * (whole + Fraction(top, bottom)) if bottom else None


def _read_unit(rest: str) -> str | None:
    """Return the unit in the text after a number, "" if there is none, or None if the text is something else."""
    rest = re.sub(r"\\[,;:! ]|~|\\left|\\right", " ", _DEGREES.sub("", rest, count=1)).strip(" .,;:*$€£¥₹`\n\t")
    bare = re.sub(r"\^\s*\{?[-0-9]+\}?", "", rest)
    if len(rest) > _LONGEST_UNIT or _NO_UNIT.search(bare):
        return None
    if rest and not _UNIT.fullmatch(bare) and not re.fullmatch(r"[\u4e00-\u9fff\u3040-\u30ff\uac00-\ud7a3]{1,6}", bare):
        return None
    words = re.sub(r"[^\W\d_]+", lambda word: _shorten_unit(word[0]), rest.casefold())
    words = re.sub(r"(\^[23])\W+(\w+)", r"\2\1", words)  # square meters
    return re.sub(r"[\s{}.·*]", "", re.sub(r"\s*\b(\w+)\^\{?-1\}?", r"/\1", words))


def _shorten_unit(word: str) -> str:
    single = word.removesuffix("s") if len(word) > 3 and word not in _UNIT_NAMES else word
    return _UNIT_NAMES.get(single, single)
