r"""Finds the answer that a text states. docs/guides/rewards.md documents the order of precedence.

Explicit statements are `\boxed{}`, `<answer>`, `#### ` and sentences such as "The answer is 42." or "答案是 42". The one that begins last
counts, and a correction after it replaces it ("... No, it is 43."). An explicit statement that cannot be read is an answer that cannot be
read: nothing else in the text is used instead. Only a text without an explicit statement is read by its last sentence or formula.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_rl.rewards.numbers import NUMBER
from megatron_rl.rewards.spellings import normalize, translate

_BE = r"(?:(?:is|are|was)(?:(?=n't)|\b)|equals|becomes|(?:must|should|would|will)\s+be)(?:(?=n't)|\b)"
_STATEMENT = re.compile(
    rf"""(?ix)(?P<box>\\(?:boxed|fbox)\b)
    | (?P<tag><(?:final_)?answer>|<\|begin_of_box\|>)
    | (?P<hash>\#\#\#\#+(?!\#))
    | (?P<phrase>
        \b(?:answer|ans|(?:correct|right|best)\s+(?:option|choice))s?\b["*_`\s]*(?:\((?:final|s)\)\s*)?(?:(?:to|for|of|here)\b[^.\n:=]{{0,100}}?)?
          (?:\s*(?:{_BE}(?:\s*(?:therefore|thus|then|indeed|simply|just)\b,?)?|[:=])["*_`]*)+
      | \b(?:i|we)(?:'ll|'d)?\s+(?:would\s+|will\s+)?(?:choose|pick|select|go\s+with)\b(?:\s+(?:option|choice|answer))?
      | 答案(?:应该|应当|应|就)?(?:(?:是|为|等于)\s*:?|:) | (?:答案|故|应)?选(?:择|项)?(?:是|为|:)*\s*(?=\(?[A-J])
      | (?:^|(?<=[\n\s]))(?:答|答え)\s*: | (?:答え|正解|解答)は | 정답은 | 답은
      )
    | (?P<named>(?<![^\s.,:;])(?P<what>[^\s.,:;]{{1,100}})
          \s+is\s+(?:(?:the|our|my)\s+(?:final\s+|correct\s+|right\s+)?(?:answer|option|choice)|(?P<fits>correct|right))\b)"""
)
_EVALUATION = re.compile(
    r"(?i)\W*"
    r"(?:correct|right|valid|reasonable|verified|confirmed|consistent|below|above|clear|obvious|given|as follows|found|obtained|wrong"
    r"|incorrect|in the\b|one of\b|among\b|what\b|that\b)"
)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|</|(?<!\\)(?:;|!+)(?=\s|$)|\n")
_SENTENCE_BREAK = re.compile(r"(?<![0-9])(?<!\b[A-J])\.(?=\s)|(?<=[0-9])\.(?=\s|$)|[!?](?=\s)|\n\s*\n|(?<!\\)\n(?!\s*\\)")
_CLOSING_TAG = re.compile(r"(?i)</(?:final_)?answer>|<\|end_of_box\|>")
_CHECKS = re.compile(
    r"(?i)\b(?:check|verify|confirm|simplify|express|suppos|assum|guess|imagin|if\b)\w*[^\w.!?\n]+(?:\w+[^\w.!?\n]+){0,2}$"
    r"|\b(?:alternative|another|different|other|wrong|incorrect|plausible|tempting)\s+$"
)
_DOUBTS = re.compile(
    r"(?i)\b(?:whether|unsure|unclear|doubt|not (?:sure|certain|clear|true)|(?:do not|don't|cannot|can't) (?:know|think|believe|say)"
    r"|impossible|unlikely|(?:nobody|someone|some|others?|they|one) (?:\w+ )?(?:says?|thinks?|claims?))\b,?\s+(?:\w+\s+){0,3}$"
)
CLAUSE_END = re.compile(r"(?i)(?:,\s*|\s+)(?:because|since|as(?!\s+well)|so|which|where|hence|therefore)\b")
_REASON = re.compile(r"(?i)(?:,\s*|\s+)(?:because|since|where)\b")
_HEADING = re.compile(r"\s*(?:[^\W\d_]{3,}[:,]?\s+\S|$)")  # "#### Step 3"
_EMPHASIS = re.compile(r"(?<!\w)\*\*(?=\S)|(?<=\S)\*\*(?!\w)")
_NOT = re.compile(
    r"(?i)\s*(?:(?:definitely|certainly|actually)\s+)?(?:not\b|n't\b|never\b)[^.\n]*?(?:[,;]|\bbut\b|\brather\b)[,\s]*"
    r"(?:(?:it|this|that)(?:'s|\s+is)\s+|but\s+|rather\s+)*"
)
_NEGATION = re.compile(r"(?i)\s*(?:definitely\s+|certainly\s+)?(?:not|n't|never|anything but|everything but|unknown|unclear)\b")
_CONTRAST = re.compile(r"(?i)(?:,|\s+and|\s*\()?\s*\b(?:not|instead of|rather than)\b")
_RETRACTION = re.compile(
    r"(?i)(?:^|[.!?\n;,—-]|\bbut\b)\s*(?:oh\s+|hmm,?\s+|but\s+|ah,?\s+)?"
    r"(?:no\b(?=[,.:!\s]*(?:wait|it|that|the|sorry|actually|-?\\?\$?[0-9]))"
    r"|wait\b|actually\b|sorry\b|oops\b|correction\b|scratch that\b|on second thought|i (?:made a mistake|was wrong|mean)\b"
    r"|that(?:'s| is| was) (?:wrong|not right|incorrect)|let me (?:re|correct|fix))"
)
_CONFIRMATION = re.compile(r"(?i)\b(?:correct|right|confirmed|confirms|checks out|holds|consistent|verified)\b")
_REVISED = re.compile(
    r"(?i)"
    rf"(?:\b(?:it|this|that|result|total|value|make (?:it|that)|i mean|no|wait|sorry|actually|correction)\b\s*(?:'s\b|{_BE})?)\s*[,:]?\s*"
    r"(?=[-+$\\(*]*(?:[0-9]|frac|boxed)|[$(*]*(?-i:[A-J])\b(?! [a-z]))"
)
HEDGE = re.compile(
    r"(?i)\b(?:or|either|maybe|perhaps|possibly|could|might|(?-i:may)|may be|guess|suppose|assume|not sure|for example|such as|somewhere"
    r"|between(?=\s+[-$\\]*[0-9])|like(?=\s+\$?[0-9])|at (?:most|least)|also (?:work|possible|valid|correct|right|true))\b|\be\.g\.|\?|或"
)
_GIVES_UP = re.compile(
    r"(?i)\b(?:(?:do not|don't) know|(?:cannot|can't|unable to) (?:answer|determine|find|go|help|say|solve|tell)|refuse"
    r"|(?:won't|will not) answer|cannot be (?:answered|determined|solved)|impossible to (?:answer|determine|say|tell)|give up|no idea"
    r"|not (?:sure|certain))\b"
)
_OPTION = re.compile(r"\W*([A-J])[).:]\s")
_BOLD_NUMBER = re.compile(r"\*\*([^*\n]*[0-9][^*\n]*)\*\*")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$([^$\n]+)(?<!\\)\$(?![0-9])|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BETWEEN = re.compile(r"(?i)[\s,;.$]*(?:\\?(?:text|quad|qquad)?\{?\s*(?:and|or|和|或)\s*\}?)?[\s,;$]*(?:[a-z]\s*=\s*)?")
_LONGEST, _LONGEST_STATEMENT, _MOST_STATEMENTS, _MOST_BOXES, _TAIL = 20_000, 2000, 100, 20, 600
"""Only so many characters at the end of a text, characters of a statement, statements, neighboring boxes, and characters at the end of a
text without explicit statements are read, so that no text takes long."""


class Statement(NamedTuple):
    """An answer as it was written. `explicit`: whether the text marks it as its answer."""

    content: str
    explicit: bool


def find_statement(text: str) -> Statement | None:
    """Return the answer that `text` states last, or None if it states nothing. The content may be unreadable or empty."""
    text = translate(normalize(text[-_LONGEST:]))
    matches = [*_STATEMENT.finditer(text)][-_MOST_STATEMENTS:]
    for index in reversed(range(len(matches))):
        if (read := _read_statement(text, matches, index)) is not None:
            return Statement(_correct(read[0], text[read[1] :]), True)
    return _implicit_statement(text[-_TAIL:])


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` of `text`, or None if there is none, it is empty, or its brace never closes."""
    start = text.rfind(r"\boxed{")
    return None if start < 0 else _read_box(text, start + len(r"\boxed"))[0] or None


def _read_statement(text: str, matches: list[re.Match[str]], index: int) -> tuple[str, int] | None:
    """Return (content, its end in the text) of a match of `_STATEMENT`, or None if it states nothing."""
    match = matches[index]
    if match["box"]:
        boxes = [(each.start(), *_read_box(text, each.end())) for each in matches[max(0, index - _MOST_BOXES) : index + 1] if each["box"]]
        return _join(text, boxes), boxes[-1][2]
    if match["tag"]:
        closing = _CLOSING_TAG.search(text, match.end())
        content = text[match.end() : closing.start() if closing else len(text)]
        return _unbox(content) if closing else "", match.end() + len(content)
    if match["hash"]:
        content = _first_sentence(text, match.end())
        end = match.end() + len(content)
        return None if _HEADING.match(content) and (text[end:].strip() or not content.strip()) else (content, end)
    if match["named"]:
        content = _unbox(match["what"])
        letters = r"^\W*[A-J]\W*$"
        stated = content != match["what"] or re.search(letters if match["fits"] else rf"[0-9\\$]|{letters}", content)
        return (content, match.end()) if stated else None
    return _read_phrase(text, match.start(), match.end())


def _join(text: str, parts: list[tuple[int, str, int]]) -> str:
    """Return the content of the last of some (start, content, end), and those before it that only separators part from it, as a list."""
    start, content, _ = parts[-1]
    for begin, before, end in reversed(parts[:-1]):
        if not _BETWEEN.fullmatch(text, end, start):
            break
        content, start = f"{before}, {content}" if before.strip() and content.strip() else "", begin
    return content


def _unbox(content: str) -> str:
    box = re.search(r"\\(?:boxed|fbox)\b", content)
    return _read_box(content, box.end())[0] if box else content


def _read_box(text: str, start: int) -> tuple[str, int]:
    """Return the content of a box and its end. A box that never closes, or is too long, is empty."""
    if bare := re.compile(r"\s+([^\s$.,{]+)").match(text, start):
        return bare[1], bare.end()
    depth, opening = 0, re.compile(r"\s*\{").match(text, start)
    for brace in re.compile("[{}]").finditer(text, start, start + _LONGEST_STATEMENT):
        depth += 1 if brace[0] == "{" else -1
        if opening and not depth:
            return text[opening.end() : brace.start()], brace.end()
    return "", len(text)


def _read_phrase(text: str, phrase: int, start: int) -> tuple[str, int] | None:
    """Return what follows a phrase such as "the answer is", up to the end of the sentence, and its end. Return None if the phrase is a
    heading above a solution, or says something about an answer ("the answer is correct")."""
    if _CHECKS.search(text, max(0, phrase - 60), phrase):
        return None
    if _DOUBTS.search(text, max(0, phrase - 60), phrase):
        return "", start
    opening = re.compile(r"[ \t*_`:]*(?:\n\s*)?(?:\\\[|\$\$)?\s*").match(text, start)
    begin = opening.end() if opening else start
    content = _first_sentence(text, begin)
    has_words = not re.search(r"[0-9\\$=^]", content)
    is_long = text[start - 1] in ":*" and not 0 < len(content.split()) <= 2 and not _NEGATION.match(content)
    return None if has_words and (is_long or _EVALUATION.match(content)) else (content, begin + len(content))


def _first_sentence(text: str, start: int = 0) -> str:
    text = text[start : start + _LONGEST_STATEMENT]
    end = _SENTENCE_END.search(text)
    return text[: end.start() if end else len(text)]


def _correct(content: str, rest: str) -> str:
    """Return the content of a statement after corrections: within it ("not 42, it is 43"; "43, not 42") and behind it ("No, it is 43")."""
    if correction := _NOT.match(content):
        content = content[correction.end() :]
    elif _NEGATION.match(content):
        return ""
    content = _CONTRAST.split(content, maxsplit=1)[0] or content
    if (retraction := _RETRACTION.search(content, 1)) and re.search("[0-9]", content[: retraction.start()]):
        content, rest = content[: retraction.start()], f"{content[retraction.start() :]}. {rest}"
    retractions = [*_RETRACTION.finditer(rest)]
    if not retractions:
        return content
    rest = rest[retractions[-1].start() :]
    if revised := [*_REVISED.finditer(rest)]:
        return _first_sentence(rest, revised[-1].end())
    return content if _CONFIRMATION.search(rest) or not re.search(r"[0-9]|\b(?:wrong|incorrect|not right|mistake)\b", rest) else ""


def _implicit_statement(tail: str) -> Statement | None:
    """Return the last formula or number of a text without explicit statements. A sentence that hedges states nothing."""
    sentences = [sentence for sentence in _SENTENCE_BREAK.split(tail) if sentence.strip(" .*$")]
    last = next((index for index in reversed(range(len(sentences))) if re.search(r"[0-9$\\]", sentences[index])), -1)
    if not sentences or _GIVES_UP.search(" ".join(sentences[last - (last > 0 and not re.search("[A-Za-z]{2}", sentences[last])) :])):
        return None
    sentence = sentences[last]
    if HEDGE.search(sentence):
        return None
    option, before = _OPTION.match(sentence), _OPTION.match("".join(sentences[:last][-1:]))
    if option and before and ord(before[1]) + 1 == ord(option[1]):
        return None  # the options of a choice
    formulas = [*_FORMULA.finditer(sentence)]
    if formulas:
        return Statement(_join(sentence, [(each.start(), next(filter(None, each.groups())), each.end()) for each in formulas]), False)
    bold = _BOLD_NUMBER.findall(sentence)
    return Statement(bold[0] if len(bold) == 1 and "=" not in sentence else sentence.strip(), False)


_SPACES = re.compile(r"^(?:\\[,;:! ]\s*)+|(?:\\[,;:! ]\s*)+$|(?<=\S)\\$")
_REMARK = re.compile(r"(?<=[\w.$%])\s+\((?!mod\b)(?:[^()0-9\\$]{3,}|[^()\\]*\b[A-Za-z]{3,}\b[^()\\]*)\)\W*$")


def strip_wrapping(stated: Statement) -> str:
    r"""Return the content without emphasis, dollar signs around it, trailing punctuation, and reasons."""
    content, clause_end = stated.content, CLAUSE_END if stated.explicit else _REASON
    content = _SPACES.sub("", _EMPHASIS.sub("", content.strip().strip('*`_" ')))
    if content.count("}") > content.count("{"):  # {"answer": 42}
        content = content.rstrip('} \n"')
    content = _REMARK.sub(lambda match: match[0] if HEDGE.search(match[0]) else "", clause_end.split(content, maxsplit=1)[0])
    content = re.sub(r"^\s*(?:\\\(|\\\[|\$\$?)\s*(.*?)\s*(?:\\\)|\\\]|\$\$?)[\s.,*]*$", r"\1", content, flags=re.DOTALL)
    return re.sub(r"(?:\\[\])]|[\s.,;:*`]|(?<![\d)])(?<!\b[a-z])!|\$\$)+$", "", content).lstrip("*` ")


def last_number(sentence: str) -> str | None:
    """Return the number that a sentence of words ends with, or the right-hand side of its last equation. Return None if the number is part
    of an expression or of a list, or is negated."""
    sentence = re.sub(r"(?<=\w)\s+\([^()]*[-+*/×÷=][^()]*\)\W*$", "", sentence)  # "42 apples (40 + 2)"
    sentence = re.sub(r"(?<=[ckdmf][mt]|in)\^\{?[23]\}?", "", sentence)  # units of area and volume
    _, equals, sentence = sentence.rpartition("=")
    matches = [*NUMBER.finditer(sentence)]
    if not matches:
        return None
    last = matches[0 if equals else -1]
    before, after = sentence[: last.end() - len(last[0].lstrip())], sentence[last.end() :]
    if last["sign"] and re.search(r"(?:[0-9)}\]]\s*|\w|\b[A-Za-z]\s+)$", before):
        return None
    if _PART_BEFORE.search(before) or _PART_AFTER.match(after) or _NEGATED.search(before):
        return None
    return last[0]


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
_NEGATED = re.compile(
    r"(?i)(?:不是|并非)\s*$|(?:\b(?:not|no way|never|cannot|but|except|instead of|rather than|nicht|pas|не)|n't|≠)\W+(?:\w+\W+){0,3}$"
)
