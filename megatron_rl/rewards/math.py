"""Reward of mathematical word problems: exact comparison of integers first, math-verify for everything else.

Most gold answers of GSM8K and many of MATH are integers, and most completions state their answer in one of a few ways. Comparing these as
text takes microseconds. math-verify handles fractions, expressions, sets and units by parsing both sides with SymPy.

Nothing here limits the time that SymPy takes. `RewardPool` does, by killing the worker.
"""

import functools
import logging
import re
from typing import Any

from megatron_rl.types import Problem, Reward

_SEPARATOR = r"(?:,|\{,\}|\\[,!])+"  # 1,000  1{,}000  1\,000  1,\!000
_INTEGER = rf"[-+]?(?:[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{3}})+|[0-9]+)"
_ONLY_AN_INTEGER = re.compile(rf"[\s*:=]*\$?(?:\\?\$)?\s*({_INTEGER})\s*\$?[\s.*!]*")
_NUMBER = re.compile(rf"{_INTEGER}(?:\.[0-9]+)?")
_ANSWER_IS = re.compile(r"answer is", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"\.\s|\n")
_MAY_STAND_BEFORE = re.compile(r"(?:^|[\s=:>$])$")  # directly before a number that is not part of an expression
_OPERATOR_BEFORE = re.compile(r"(?:[-+*/^_×÷·√(\[{,\\0-9]|\\[a-z]+|\b(?:sqrt|log|ln))\s*\$?$")
_MATH_AFTER = re.compile(r"[-+*/^_×÷·=<>(){}\[\]\\%]|^\w|\b(?:[b-z]|pi|sqrt|percent)\b", re.IGNORECASE)  # "a" is an article
_TAIL_CHARACTERS = 200


def reward(text: str, problem: Problem) -> Reward:
    """Return 1.0 if the final answer of `text` equals `problem.answer` (a number or LaTeX), else 0.0. Run it in a pool with a timeout,
    because a hostile expression can take forever."""
    verdict = compare_integers(text, problem.answer)
    if verdict is None:
        gold = _parsed_gold(problem.answer)
        if not gold:
            return Reward(0.0, False, error=f"the gold answer {problem.answer[:80]!r} could not be parsed")
        verdict = _verify(gold, text)
    return Reward(float(verdict), verdict)


def compare_integers(text: str, gold: str) -> bool | None:
    r"""Return whether `text` states the integer `gold` as its answer, or None if math-verify must decide.

    The answer is in the last `\boxed{}`, or else after the last `####`, or else after the last "answer is". It decides if it is a single
    integer. Without a stated answer, the text's last number decides if it equals `gold` and is not part of an expression.
    """
    expected = _only_integer(gold)
    if expected is None:
        return None
    stated = _stated_answer(text)
    if stated is not None:
        answer = _only_integer(stated)
        return None if answer is None else answer == expected
    return True if _last_number(text) == expected else None


def final_answer(text: str) -> str | None:
    """Return the answer that `text` states, as `compare_integers` finds it, or None. An integer is returned in canonical form, any other
    answer without white space. If no answer is stated, return the text's last integer that is not part of an expression."""
    stated = _stated_answer(text)
    if stated is None:
        return _last_number(text)
    integer = _only_integer(stated) if len(stated) <= _TAIL_CHARACTERS else None  # the pattern takes n^2 steps for n blanks
    return integer or "".join(stated.split()).rstrip(".") or None


def _stated_answer(text: str) -> str | None:
    r"""Return the text in the last complete `\boxed{}`, after the last `####` or after the last "answer is", in this order."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    _, marker, rest = text.rpartition("####")
    if marker:
        return rest.split("\n", 1)[0]
    matches = list(_ANSWER_IS.finditer(text))
    return _END_OF_SENTENCE.split(text[matches[-1].end() :], maxsplit=1)[0] if matches else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` of `text`, or None if there is none or its brace never closes."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index]
    return None


def _only_integer(text: str) -> str | None:
    """Return the integer that `text` consists of, without separators, plus sign or leading zeros, or None."""
    match = _ONLY_AN_INTEGER.fullmatch(text)
    return _canonical(match[1]) if match else None


def _canonical(integer: str) -> str:
    digits = re.sub(r"[^0-9]", "", integer).lstrip("0") or "0"
    return f"-{digits}" if integer.startswith("-") and digits != "0" else digits


def _last_number(text: str) -> str | None:
    """Return the last number of the text's last 200 characters in canonical form if it is an integer that is not part of an expression."""
    tail = text[-_TAIL_CHARACTERS:]
    matches = list(_NUMBER.finditer(tail))
    if not matches:
        return None
    last = matches[-1]
    before, after = tail[: last.start()], tail[last.end() :]
    if "." in last[0] or not _MAY_STAND_BEFORE.search(before) or _OPERATOR_BEFORE.search(before) or _MATH_AFTER.search(after):
        return None
    return _canonical(last[0])


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    r"""Parse the gold answer with math-verify. It is wrapped in `\boxed{}` because math-verify would overlook bare LaTeX."""
    wrapped = gold if r"\boxed" in gold else rf"\boxed{{{gold}}}"
    parsed: list[Any] = _math_verify().parse(wrapped, parsing_timeout=None)
    return parsed


def _verify(gold: list[Any], text: str) -> bool:
    math_verify = _math_verify()
    return bool(math_verify.verify(gold, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None))


def prepare() -> None:
    """Load math-verify and its grammar, which takes seconds. A worker calls this before its first sample."""
    _verify(_parsed_gold("1"), "$1$")


@functools.cache
def _math_verify() -> Any:
    """Import the library on first use. Its own timeouts are off, because the pool's timeout covers more, and so is its warning about
    that."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify
