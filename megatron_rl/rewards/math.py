r"""Reward of mathematical word problems: compares the answer that a completion states (`statements`) with the gold answer, by its kind:
values (`values`), values with names (`x = 1, y = 2`), words (`\text{Tuesday}`, H2O), and formulas, which math-verify parses with SymPy.

A formula that SymPy may not finish, such as `9^{9^9}`, is not equal to a gold answer without this operation. Beyond that, nothing here
limits the time that SymPy takes. `RewardPool` does, by killing the worker.
"""

import functools
import logging
import re
from itertools import accumulate, zip_longest
from typing import Any

from megatron_rl.rewards.statements import HEDGE, Statement, find_statement, normalize, strip_wrapping
from megatron_rl.rewards.thinking import DEFAULT_MARKERS, ThoughtMarkers, split_thought
from megatron_rl.rewards.values import NUMBER, Number, find_kind, last_number, parse_number, plain, read_times
from megatron_rl.types import Problem, Reward

_ASSIGNMENT = re.compile(r"[\s$]*(\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\([^()=]*\))?)\s*=\s*([^=]+?)[\s$.]*")
_TUPLES = re.compile(r"\(([a-z](?:,\s*[a-z])*)\)\s*=\s*\(([^()]*)\)")
_ONE_MEANING = re.compile(r"[A-Za-z]|.*\(.*[0-9A-Z].*\)")  # a letter, f(2), or P(A)
_AND = re.compile(r"[,;]\s*(?:and|or)\b|[,;]|\b(?:and|or)\b|\\(?:quad|lor|vee)\b")
_DECIMAL_COMMA = re.compile(
    r"^[-+]?\s*(?:(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]+),[0-9]{1,2}(?![0-9,.])|[0-9]{1,3}(?:\.[0-9]{3}){2,}(?![0-9.]))"
)
_WORDS = re.compile(
    r"(?=.*(?!(?:and|or|to|pi|ln|sin|cos|tan|log|exp|lim|max|min|gcd|lcm|det|mod)\b)(?:[^\W\d_]{3}|\b[A-Z]{2}|\b[^\W\d_]{2}\b|[\u4e00-\u9fff]))"
    r"(?![0-9]*[a-z]\b)[\w'.&]+(?:[\s,-]+[\w'.&]+)*"
)
_ORDINAL = re.compile("[0-9]+(?:st|nd|rd|th)")
_SUBSTANCE = re.compile(r"(?=.*[0-9+-])\(?[A-Z][A-Za-z0-9()]*(?:\^?[0-9]?[+-])?")
_ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
_ASSIGNED = re.compile(
    r"^(?:[A-Za-z]\w?(?:_\{?\w+\}?)?'*(?:\([^()=]*\))?|\\[a-zA-Z]+(?:\s+[A-Z]+)?|[A-Z]{2,3}|[A-Za-z]{3,}(?:\s+[a-z]+){0,3}|\([a-z](?:,\s*[a-z])*\))\s*=\s*(?=[^=]*$)"
)
_RELATION = re.compile(r"[<>≤≥≠]|\\(?:(?:l|g|n)(?:t|eq?)|equiv|pmod|bmod)\b|[0-9]\s*:\s*[0-9]")
_UNFINISHED = re.compile(r"^[^=]*[0-9)]\s*[-+*×÷]\s*[(0-9][^=]*$")
_LEAD = re.compile(
    r"(?i)^(?:\(?(?-i:[A-J])\)[\s:]*(?=\S))?(?:(?:\\approx|≈|~|about|approximately|roughly|around|exactly|simply|just|only|a total of)\s*)?"
)
_DETAIL = re.compile(rf"({NUMBER.pattern}(?:\s+(?!(?:and|or|than|by|of|to|times|plus|minus|over|mod)\b)[^\W\d_]+){{1,5}}\s*)(?=[0-9])")
_SAYS_MORE = re.compile(r"(?<!\\)\b(?:not|wrong|is|are|isn't|but|than|incorrect|except|most|least|any|all|every|between)\b", re.IGNORECASE)
_INTERVAL = re.compile(r"\s*(?:[a-z]\s*\\in\b\s*)?(?:\\left)?\s*[(\[]")
_SET, _TUPLE = re.compile(r"\W*\\\{"), re.compile(r"(?:\\left)?\((?!.*\)\s*,)")
_ORDER = re.compile(r"[<>≤≥]|\\[lg](?:eq?|t)(?![a-z])")
_SYMBOL = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])")
_BLANKS = re.compile(r"\s+|\\(?:left|right)(?![a-z])")
_EQUATION = re.compile(r"(?<![<>!\\])=(?!=)")
_MATH_PARTS = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)")
_LONGEST_VOTE, _LONGEST_FORMULA, _DEEPEST_FORMULA = 60, 500, 6
_ONLY_AS_GOLD = (
    re.compile(r"\^\s*\{?\s*[-+(]*[0-9]{5}|[0-9)}]\s*\^\s*[{(\s]*[0-9]+[)}\s]*\^"),
    re.compile(r"(?:^|.*?[^\\A-Za-z])[A-Za-z](?![A-Za-z]).*[)}\]]\s*\^\s*\{?\s*[0-9]{2}"),
    re.compile(r"[0-9]{4}\s*!|[)}!]\s*!|binom\s*\{?\s*[0-9]{4}"),
    re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![a-z])|(?:\|[^|]*){9}"),
)
_OVERLOOKED = re.compile(r"\.\.|\\ldots|[0-9]_\{?[0-9]|\\(?:neg|lnot|gcd|lcm|[pb]mod)\b|¬")
"""Operations that take SymPy seconds or more, and what math-verify overlooks. Only a gold answer that has them lets an answer have them."""
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}(?![A-Za-z({])|[\u0400-\u04ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]{2}")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off; the pool's covers more


def reward(text: str, problem: Problem, *, thinking: ThoughtMarkers | None = DEFAULT_MARKERS) -> Reward:
    """Return 1.0 if the answer that `text` states last, behind the thought between the markers `thinking`, equals `problem.answer`,
    else 0.0. Run it in a pool with a timeout, because a hostile expression can take forever."""
    answer = split_thought(text, problem.prompt, thinking).answer
    stated = None if answer is None else find_statement(answer)
    if stated is None:
        return Reward(0.0, False, answer="")
    gold = normalize(problem.answer).strip()
    correct = _equals(stated, gold)
    if not (correct or find_kind(plain(gold)) or _is_name(plain(gold)) or _OVERLOOKED.search(gold) or _parse(gold)):
        return Reward(0.0, False, error=f"the gold answer {problem.answer[:80]!r} could not be parsed")
    return Reward(float(correct), correct, answer=problem.answer.strip() if correct else _read_vote(stated, gold))


def final_answer(text: str) -> str | None:
    """Return the answer that `text` states in canonical form, or None. The text is without its thought."""
    stated = find_statement(text)
    return _spell(stated) or None if stated else None


def _spell(stated: Statement) -> str:
    """Return a text that is the same for different spellings of a number, and "" for an unreadable statement."""
    if number := _read_number(stated):
        return f"{number.value}{'%' * (number.unit == '%')}"
    return "".join(strip_wrapping(stated).split()) if stated.explicit else ""


def _read_vote(stated: Statement, gold: str) -> str:
    """Return the canonical form of an answer to a problem with the gold answer `gold`, or "" if it states none of this kind."""
    content, is_vague = strip_wrapping(stated).casefold(), bool(HEDGE.search(stated.content))
    if read := find_kind(plain(gold)):
        return "" if is_vague else ",".join(sorted(map(str, read(plain(stated.content)))))
    if parse_number(_LEAD.sub("", gold)) or _read_number(stated):
        return _spell(stated)
    if not stated.explicit and (is_vague or len(content) > _LONGEST_VOTE):
        return ""
    content = re.sub(r"^\\?\{(.*?)\\?\}$", r"\1", "".join(_ASSIGNED.sub("", _list_values(content)).split()))
    if _is_name(plain(gold)):
        return content.partition(",")[0]
    return ",".join(sorted(content.split(","))) if "," in gold and content[:1] not in "([" else content


def _equals(stated: Statement, gold: str) -> bool:
    content, words = strip_wrapping(stated), plain(gold)
    if not content:
        return False
    if read := find_kind(words):
        return not HEDGE.search(content) and read(plain(content)) == read(words)
    named, found = _read_names(gold), _read_names(content)
    if len(named) > 1 and not found and "=" not in content:
        return _equals(Statement(f"({content.strip('()')})", True), _list_values(gold))
    if len(named) > 1 or (named and found and (named.keys() == found.keys() or all(map(_ONE_MEANING.fullmatch, (*named, *found))))):
        return found.keys() == named.keys() and all(_equals(Statement(found[name], True), named[name]) for name in named)
    if found or "=" not in content or not _SYMBOL.search("".join(named.values())):  # the equation y = 2x matches y - 2x = 0
        gold = "".join(named.values()) or gold
    expected = None if _ORDINAL.fullmatch(words) else parse_number(_LEAD.sub("", gold))
    if expected is not None:
        if expected.unit and read_times(words) and read_times(words) == read_times(plain(content)):
            return True
        if (number := _read_number(stated)) is not None:
            return number.equals(expected)
        return (stated.explicit or not _UNFINISHED.search(content)) and _is_formula(content, gold) and _verify(gold, content)
    if _is_name(words):
        return _states_words(plain(content), words, stated.explicit)
    formulas = _MATH_PARTS.findall(content) if _PROSE.search(content) else []
    if "," in gold or HEDGE.search(gold):
        content, gold = (_AND.sub(",", _list_values(text)) for text in (content, gold))
    return _is_formula(content, gold) and _verify(gold, "".join(formulas[-1]) if formulas else content)


def _read_names(content: str) -> dict[str, str]:
    r"""Return the values by name of `x = 1, y = 2` and `(x, y) = (1, 2)`, or the list `1, 2` of `x = 1 \text{ or } x = 2`."""
    content, names = re.sub(r"\\(?:left|right)(?=\W)|\\[,;:! ]", "", content), dict[str, list[str]]()
    if pair := _TUPLES.fullmatch(content):
        content = ",".join("=".join(each) for each in zip_longest(re.findall("[a-z]", pair[1]), pair[2].split(","), fillvalue=""))
    for part in filter(str.strip, _AND.split(content)):
        if (assignment := _ASSIGNMENT.fullmatch(part)) is None:
            return {}
        names.setdefault(assignment[1], []).append(assignment[2])
    if len(names) > 1 and (HEDGE.search(content) or max(map(len, names.values())) > 1):
        return {}
    return {name: ", ".join(values) for name, values in names.items()}


def _list_values(content: str) -> str:
    """Return `x = 1, y = 2` as the tuple `(1, 2)`, in the order of the alphabet, `x = 1` as 1, and other contents unchanged."""
    names = _read_names(content)
    return f"({', '.join(names[name] for name in sorted(names))})" if len(names) > 1 else "".join(names.values()) or content


def _is_name(gold: str) -> bool:
    return bool(_WORDS.fullmatch(gold) or _ORDINAL.fullmatch(gold) or _SUBSTANCE.fullmatch(re.sub("[_{}]", "", gold)))


def _read_number(stated: Statement) -> Number | None:
    """Return the number of a statement: the whole content, the right-hand side of an assignment, or the number of a sentence."""
    content = _LEAD.sub("", strip_wrapping(stated))
    content = _DECIMAL_COMMA.sub(lambda match: match[0].replace(".", "").replace(",", "."), content)
    if HEDGE.search(content):
        return None
    if (number := parse_number(_ASSIGNED.sub("", content))) is not None:
        return number
    if _EQUATION.search(content) and not _SYMBOL.search(content):
        return parse_number(_EQUATION.split(content)[-1]) if not stated.explicit or _holds(content) else None
    if not _PROSE.search(content) and stated.explicit:
        return None
    if stated.explicit and "=" not in content and len([*NUMBER.finditer(content)]) > 1:  # "29 marbles after 3 days"
        detailed = _DETAIL.match(content)
        content = detailed[1] if detailed else ""
    found = last_number(content)
    return None if found is None else parse_number(found)


def _states_words(content: str, words: str, explicit: bool) -> bool:
    """Return whether an explicit statement begins with the words, or a sentence consists of or ends with them, such as "It is Friday."."""
    if HEDGE.search(content):
        return False
    content, words = _fold(content), _fold(words)
    if explicit and {*map(str.strip, _AND.split(content))} == {*map(str.strip, _AND.split(words))}:  # "Alice, Bob" or "Bob and Alice"
        return True
    if not explicit and (last := re.fullmatch(rf"(.*\b(?:is|are|was|were|on)\s+)(?:(?:an?|the)\s+)?{re.escape(words)}\W*", content)):
        return not re.search(r"\b(?:not|never)\b|n't", last[1])
    rest = content.removeprefix(words)
    return content.startswith(words) and not re.match(r"\w|\s*(?:or|and|not)\b|[\s,]+\w+\s*\?" if explicit else r"\w|\s+\w", rest)


def _fold(words: str) -> str:
    """Return words in lowercase and singular, without article, subscripts and superscripts, and with ordinals in digits."""
    words = re.sub(r"^(?:the|an?)\s+|(?<=[a-z]{3})s\b|\s+(?=_)|[_{}^]", "", words.casefold())
    words = re.sub(rf"^(?:{'|'.join(_ORDINALS)})\b", lambda match: f"{_ORDINALS.index(match[0]) + 1}th", words)
    return re.sub(r"(?<=[0-9])(?:st|nd|rd)\b", "th", words)


def _is_formula(content: str, gold: str) -> bool:
    """Return whether math-verify may compare the content: no sentence of words, no hedge, and no equation unless the gold answer is one.
    math-verify would compare only the right-hand side of `3x = 42`."""
    if HEDGE.search(content) or content.count("{") != content.count("}") or not _is_affordable(content, gold):
        return False
    if not any(map(_INTERVAL.match, (gold, content))) and bool(_RELATION.search(content)) != bool(_RELATION.search(gold)):
        return False
    if _SAYS_MORE.search(content) or any(_SET.match(one) and _TUPLE.match(other) for one, other in ((content, gold), (gold, content))):
        return False
    if _EQUATION.search(gold) and not _EQUATION.search(content):
        return not re.search(r"[-+*/^]|(?<![_{0-9])[0-9]", re.sub(r"\([^()]*\)", "", gold.split("=")[0]))
    if _EQUATION.search(content) and not _EQUATION.search(gold):
        return bool(_ASSIGNED.match(content)) or (not _SYMBOL.search(content.split("=")[0]) and _holds(content))
    return True


def _holds(equation: str) -> bool:
    """Return whether the sides of an equation are equal."""
    *others, last = _EQUATION.split(equation)
    return all(_is_affordable(side, last) and _verify(last, side) for side in others)


def _is_affordable(content: str, gold: str) -> bool:
    """Return whether math-verify can compare the content in less than a second or so."""
    brackets = [[1 if bracket in "([{" else -1 for bracket in re.findall(r"[(\[{}\])]", text)] for text in (content, gold)]
    depth, allowed = (max(accumulate(each, initial=0)) for each in brackets)
    if len(content) > min(max(150, 3 * len(gold)), _LONGEST_FORMULA) or depth > max(_DEEPEST_FORMULA, allowed):
        return False
    return not any(operation.search(content) and not operation.search(gold) for operation in (*_ONLY_AS_GOLD, _OVERLOOKED))


def _verify(gold: str, content: str) -> bool:
    if content == gold or _OVERLOOKED.search(gold):
        return _BLANKS.sub("", content.replace("...", r"\ldots")) == _BLANKS.sub("", gold.replace("...", r"\ldots"))
    from math_verify import verify  # takes seconds

    rounding = 6 if re.search("[A-Za-z/]", gold) else 12  # decimals may stand for roots and fractions, not for integers
    return bool(verify(_parse(gold), _parse(content, r"\cup" in gold), rounding, timeout_seconds=None, allow_set_relation_comp=True))


@functools.lru_cache(maxsize=4096)
def _parse(content: str, is_union: bool = False) -> list[Any]:
    r"""Parse with math-verify, in a `\boxed{}` because math-verify would overlook bare LaTeX. If `is_union`, `x < 1, x > 2` is a set."""
    from math_verify import parse
    from sympy import And, FiniteSet, Rel, Union

    parsed: list[Any] = parse(content if r"\boxed" in content else rf"\boxed{{{content}}}", parsing_timeout=None)
    first = parsed[0] if parsed and _ORDER.search(content) else None
    if isinstance(first, And):
        return [first.func(*(each.canonical for each in first.args))]  # 3 > x > 1 is 1 < x < 3
    if is_union and isinstance(first, FiniteSet) and len(first.free_symbols) == 1:
        sides = [{each.lhs, each.rhs} for each in first.atoms(Rel)]
        if all(pair & first.free_symbols and any(side.is_number for side in pair) for pair in sides):
            return [Union(*(each.as_set() for each in first.args))]
    return parsed


def prepare() -> None:
    """Load math-verify and its grammar, which takes seconds. A worker calls this before its first sample."""
    _verify("x", "y")
