r"""Finds the answer that a text states, in some languages. docs/guides/rewards.md documents the order of precedence.

An explicit statement, such as `\boxed{}`, that cannot be read is an answer that cannot be read: nothing else in the text is used instead.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

_MARKS: dict[str, str | int | None] = dict(zip("−‐\u2011’٫٬٪\u200e\u200f\u061c", [*"---'.,%", "", "", ""], strict=True))
_MARKS |= {wide: f"{narrow} " for wide, narrow in zip("。！；、，،", ".!;,,,", strict=True)}
_MARKS |= {"∞": r"\infty ", "∪": r"\cup ", "π": r"\pi ", "≡": r"\equiv ", "∅": r"\emptyset "}
_FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_TEXT = r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf|sf|it)|mbox|ce|operatorname)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"


def _to_fraction(match: re.Match[str]) -> str:
    """Return a decimal whose last digits repeat without end as a fraction."""
    top = int(match[1] + match[2] + match[3]) - int("0" + match[1] + match[2])
    return rf"\frac{{{top}}}{{{'9' * len(match[3]) + '0' * len(match[2])}}}"


_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<![\w)])[–—](?=[0-9])"), "-"),
    (re.compile(r"√\s*(?:([0-9]+|[a-z](?![a-z]))|\(([^()]*)\))"), lambda match: rf"\sqrt{{{match[1] or match[2]}}}"),
    (re.compile(r"\d"), lambda match: str(int(match[0]))),  # the digits of every script
    *[(re.compile(rf"(\\[a-z]+)?{_TEXT}"), lambda match: f"{match[1]} {match[2]}" if match[1] else match[2])] * 2,
    (re.compile(r"(\\[dtc]?frac)\s*([0-9])\s*([0-9])"), r"\1{\2}{\3}"),
    (re.compile(r"(?<![0-9])([0-9]*)\.([0-9]*)\\overline\s*\{([0-9]+)\}"), _to_fraction),
    (re.compile(r"<(?:final_)?answer>|<\|begin_of_box\|>", re.IGNORECASE), r"\\boxed{"),
    (re.compile(r"</(?:final_)?answer>|<\|end_of_box\|>", re.IGNORECASE), "}:"),
    (re.compile(r"\\[pb]?mod\s*(?:\{(\w+)\}|(\w+))|\(mod\s+(\w+)\)"), lambda match: rf"\pmod{{{match[match.lastindex or 0]}}}"),
    (re.compile(r"\\[lc]?dots\b"), r"\\ldots"),
    (re.compile(r"\\(?:(?:left|right)\s*\\)?([lr])angle\b"), lambda match: "(" if match[1] == "l" else ")"),
    (re.compile(r"\{:\}|\\colon\s*"), ":"),
    (re.compile(r"(?:\\left)?\\\{\s*([a-z])\s*(?::|\\mid|\|)([^{}:|]*\1[^{}:|]*?)(?:\\right)?\\\}"), r"\2"),  # {x : x > 1}
    (re.compile(r"\\varnothing\b|\b(?:the )?empty set\b|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"<(b|strong|em|u)>([^<\n]{0,200})</\1>"), r"\2"),
    (re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE), r"\1m"),
    (re.compile(r"\b(?:minus|negative)\s+(?=\$?[0-9\\])", re.IGNORECASE), "-"),
    (re.compile(r"\b(?:(?:comes|works|turns)\s+out|comes|amounts|adds\s+up)\s+to\b(?:\s+be\b)?", re.IGNORECASE), "is"),
    # colors, emoji, and the calculations in GSM8K's solutions
    (re.compile(r"\\(?:text)?color(?:box)?\s*\{\w*\}|[\U0001f300-\U0001faff\u2600-\u27bf\ufe0f\u20e3]|<<[^<>\n]{0,100}>>"), ""),
]
_NOUN = r"(?:antwort|lösung|réponse|respuesta|risposta|resposta|ответ|(?:ال)?(?:جواب|إجابة)(?:\s+(?:ال)?(?:نهائي|صحيح)ة?)?|پاسخ|उत्तर)"
_FOREIGN = re.compile(rf"\b{_NOUN}|答|답은|选|正解")
_KIND = r"(?:\s+(?:final\w*|correct\w*|corrett\w|exacte?|définitive|definitiv\w))?"
_TRANSLATIONS = [
    (rf"\b(?:ist|lautet|est|es|è)\s+(?:die|la|a)\s+(?:\w+\s+)?{_NOUN}{_KIND}\b(?:\s*:)?", "the answer is"),
    (rf"\b{_NOUN}{_KIND}\s+(?:à|a|al|de|du|del|della|auf|zu|zur|на)\b", "answer to"),
    (rf"\b{_NOUN}{_KIND}\s*[—–-]\s", "answer: "),
    (rf"\b{_NOUN}{_KIND}\b", "answer"),
    (r"\b(?:n'est|no\s+es|non\s+è|não\s+é)(?:\s+pas)?\b|\b(?:ist|lautet)\s+nicht\b|\bне\b", "is not"),
    (r"(?:\b(?:هو|هي)\s+)?(?:ليست?\b|नहीं)", "is not"),
    (r"\b(?:nicht|pas)\b|(?<=[0-9$})],)\s+(?:no|non|não)(?=\s+[-$\\(]*[0-9])", " not"),
    (r"\bc'est\b", "it is"),
    (r"\b(?:ist|lautet|beträgt|est|es|è|é|será|sería|serait|هو|هي|است|है|является|равен|равна|будет)\b", "is"),
    (r"\b(?:sondern|mais|sino|ma|بل)\b|(?<=, )а\b", "but"),
    (r"\b(?:oder|ou|или|либо|أو|या)\b|(?<=\s)o(?=\s+[0-9$\\(A-J])", "or"),
    (r"\b(?:vielleicht|möglicherweise|wahrscheinlich|peut-être|quizás?|tal vez|возможно|может)|也许|可能|大概|かもしれ|たぶん", " maybe "),
    (r"\b(?:zwischen|entre|между)\b", "between"),
    (r"\b(?:nein|non|нет)\b(?=\s*[,:.!])", "no"),
    (r"\b(?:es|это)\b", "it"),
    (r"\b(?:la|die|le)\s+(?=\(?[A-J]\b)", ""),
    (r"\b(?:weil|denn|porque|parce que|car|так как|потому что)\b", "because"),
    (r"(?<=[-0-9$}A-J)个])[\s,(]*(?:而|而且|并)?不是", ", not "),
    (r"答案[^,.\n]{0,4}不是|(?:正解|答え)は(?=[^.\n]{0,40}?(?:ではなく|では?あり?ま?せん|ではない|じゃな))", " the answer is not "),
    (r"답은(?=[^.\n]{0,40}?아[니닙])", "the answer is not "),
    (r"(?:[이가]|은|는)?\s*아니라|(?:ではなく|而是|,\s*(?:应该|应)?是(?=\s*[-0-9$\\A-J]))、?", ", but "),
    (r"(?<=[0-9$}A-J)])\s*(?:或者?|还是|か(?:または)?)\s*(?=[-0-9$\\A-J(]|$)|또는|아니면", " or "),
    (r"\b(?:warte|moment|attends|attendez|espera|подождите|стоп)\b|(?:^|(?<=[\s.,!?]))(?:不对|错了|等等|いいえ|いや|待って)", "wait, "),
]
_BE = r"(?:(?:is|are|was)(?:(?=n't)|\b)|equals|becomes|(?:must|should|would|will)\s+be)(?:(?=n't)|\b)"
_BRACED = "[^{}]*+"
for _ in range(8):
    _BRACED = rf"(?:[^{{}}]++|\{{{_BRACED}\}})*+"
_BOX = re.compile(rf"\\(?:boxed|fbox)\b(?:(?=\s*\{{(?P<braced>{_BRACED})\}})|(?=\s+(?P<bare>[^\s$.,{{]+)))?")
_STATEMENT = re.compile(
    rf"""(?ix)(?P<box>{_BOX.pattern})
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
_SENTENCE_END = re.compile(r"\.(?=\s|$)|</|(?<!\\)(?:;|(?<!\b[a-z])!+)(?=\s|$)|\n")
_SENTENCE_BREAK = re.compile(r"(?<![0-9])(?<!\b[A-J])\.(?=\s)|(?<=[0-9])\.(?=\s|$)|[!?](?=\s)|\n\s*\n|(?<!\\)\n(?!\s*\\)")
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
_BETWEEN = re.compile(r"(?i)\}?[\s,;.$]*(?:\\?(?:text|quad|qquad)?\{?\s*(?:and|or|和|或)\s*\}?)?[\s,;$]*(?:[a-z]\s*=\s*)?")
_LONGEST, _LONGEST_STATEMENT, _MOST_STATEMENTS, _TAIL = 20_000, 2000, 100, 600
"""Only so many characters at the end of a text, characters of a statement, statements, and characters at the end of a text without
explicit statements are read, so that no text takes long."""


def normalize(text: str) -> str:
    """Return `text` with the punctuation, digits, fractions, and superscripts of Unicode as ASCII and LaTeX, without commands of text."""
    text = re.sub(rf"(?<=[0-9])(?=[{_FRACTIONS}])", " ", text)  # before NFKC makes digits of small ones
    text = re.sub("[₀-₉]+", r"_\g<0>", re.sub("[⁻⁺]?[⁰¹²³⁴-⁹]+", r"^{\g<0>}", text))
    text = unicodedata.normalize("NFKC", text.translate(str.maketrans(_MARKS))).replace("⁄", "/")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def translate(text: str) -> str:
    """Return `text` with the words of some languages that state, deny, or correct an answer in English, if it has a word for "answer"."""
    if _FOREIGN.search(text.casefold()):
        for pattern, replacement in _TRANSLATIONS:
            text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
    return text


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
    boxes = [box["braced"] for box in _BOX.finditer(text)]
    return boxes[-1] or None if boxes else None


def _read_statement(text: str, matches: list[re.Match[str]], index: int) -> tuple[str, int] | None:
    """Return (content, its end in the text) of a match of `_STATEMENT`, or None if it states nothing."""
    match = matches[index]
    if match["box"]:
        found = [each for each in matches[: index + 1] if each["box"]]  # the end is -1 if the brace never closes
        boxes = [(each.start(), each["braced"] or each["bare"] or "", max(each.end("braced"), each.end("bare"))) for each in found]
        return _join(text, boxes), boxes[-1][2]
    if match["hash"]:
        content = _first_sentence(text, match.end())
        end = match.end() + len(content)
        return None if _HEADING.match(content) and (text[end:].strip() or not content.strip()) else (content, end)
    if match["named"]:
        content = last_boxed(match["what"]) or match["what"]
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
    rest = rest[retractions[-1].start() :] if retractions else ""
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
    option, before = _OPTION.match(sentence), _OPTION.match("".join(sentences[:last][-1:]))
    if HEDGE.search(sentence) or (option and before and ord(before[1]) + 1 == ord(option[1])):  # the options of a choice
        return None
    if formulas := [*_FORMULA.finditer(sentence)]:
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
        content = content.rstrip('} \n":')
    content = _REMARK.sub(lambda match: match[0] if HEDGE.search(match[0]) else "", clause_end.split(content, maxsplit=1)[0])
    content = re.sub(r"^\s*(?:\\\(|\\\[|\$\$?)\s*(.*?)\s*(?:\\\)|\\\]|\$\$?)[\s.,*]*$", r"\1", content, flags=re.DOTALL)
    return re.sub(r"(?:\\[\])]|[\s.,;:*`]|(?<![\d)])(?<!\b[a-z])!|\$\$)+$", "", content).lstrip("*` ")
