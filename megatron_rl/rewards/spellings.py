"""Rewrites the typography of answers as ASCII and LaTeX, so that the readers of `statements`, `numbers`, and `math` know one spelling."""

import re
import unicodedata
from collections.abc import Callable

_MARKS: dict[str, str | int | None] = dict(zip("−‐\u2011’٫٬٪\u200e\u200f\u061c", [*"---'.,%", "", "", ""], strict=True))
_MARKS |= {wide: f"{narrow} " for wide, narrow in zip("。！；、，،", ".!;,,,", strict=True)}
_MARKS |= {"∞": r"\infty ", "∪": r"\cup ", "π": r"\pi ", "∅": r"\emptyset "}
_FRACTIONS = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_TEXT = r"\\(?:text(?:bf|rm|it)?|math(?:rm|bf|sf|it)|mbox|ce|operatorname)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"


def _to_fraction(whole: str, fixed: str, repeated: str) -> str:
    """Return a decimal whose last digits repeat without end as a fraction."""
    top, bottom = int(whole + fixed + repeated) - int("0" + whole + fixed), (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{top}}}{{{bottom}}}"


_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<![\w)])[–—](?=[0-9])"), "-"),
    (re.compile(r"√\s*(?:([0-9]+|[a-z](?![a-z]))|\(([^()]*)\))"), lambda match: rf"\sqrt{{{match[1] or match[2]}}}"),
    (re.compile(r"\d"), lambda match: str(int(match[0]))),  # the digits of every script
    *[(re.compile(rf"(\\[a-z]+)?{_TEXT}"), lambda match: f"{match[1]} {match[2]}" if match[1] else match[2])] * 2,
    (re.compile(r"(\\[dtc]?frac)\s*([0-9])\s*([0-9])"), r"\1{\2}{\3}"),
    (re.compile(r"(?<![0-9])([0-9]*)\.([0-9]*)\\overline\s*\{([0-9]+)\}"), lambda match: _to_fraction(*match.groups())),
    (re.compile(r"\\([pb]mod)\s+(\w+)"), r"\\\1{\2}"),
    (re.compile(r"\\(?:left\s*\\)?langle\b"), "("),
    (re.compile(r"\\(?:right\s*\\)?rangle\b"), ")"),
    (re.compile(r"\{:\}|\\colon\s*"), ":"),
    (re.compile(r"\\varnothing\b|\b(?:the )?empty set\b|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"<<[^<>\n]{0,100}>>"), ""),  # the calculations in GSM8K's solutions
    (re.compile("[\U0001f300-\U0001faff\u2600-\u27bf\ufe0f\u20e3]"), ""),
    (re.compile(r"<(b|strong|em|u)>([^<\n]{0,200})</\1>"), r"\2"),
    (re.compile(r"\b([ap])\.\s?m\b\.?", re.IGNORECASE), r"\1m"),
    (re.compile(r"\b(?:minus|negative)\s+(?=\$?[0-9\\])", re.IGNORECASE), "-"),
    (re.compile(r"\b(?:(?:comes|works|turns)\s+out|comes|amounts|adds\s+up)\s+to\b(?:\s+be\b)?", re.IGNORECASE), "is"),
    (re.compile(r"\\(?:text)?color(?:box)?\s*\{\w*\}"), ""),
]


def normalize(text: str) -> str:
    """Return `text` with the punctuation, digits, fractions, and superscripts of Unicode as ASCII and LaTeX, without commands of text."""
    text = re.sub(rf"(?<=[0-9])(?=[{_FRACTIONS}])", " ", text)  # before NFKC makes digits of small ones
    text = re.sub("[₀-₉]+", r"_\g<0>", re.sub("[⁻⁺]?[⁰¹²³⁴-⁹]+", r"^{\g<0>}", text))
    text = unicodedata.normalize("NFKC", text.translate(str.maketrans(_MARKS))).replace("⁄", "/")
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


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
    (r"\b(?:vielleicht|möglicherweise|wahrscheinlich|peut-être|quizás?|tal vez|возможно|может)\b", "maybe"),
    (r"\b(?:zwischen|entre|между)\b", "between"),
    (r"\b(?:nein|non|нет)\b(?=\s*[,:.!])", "no"),
    (r"\b(?:warte|moment|attends|attendez|espera|подождите|стоп)\b", "wait"),
    (r"\b(?:es|это)\b", "it"),
    (r"\b(?:la|die|le)\s+(?=\(?[A-J]\b)", ""),
    (r"\b(?:weil|denn|porque|parce que|car|так как|потому что)\b", "because"),
    (r"(?<=[-0-9$}A-J)个])[\s,(]*(?:而|而且|并)?不是", ", not "),
    (r"答案[^,.\n]{0,4}不是|(?:正解|答え)は(?=[^.\n]{0,40}?(?:ではなく|では?あり?ま?せん|ではない|じゃな))", " the answer is not "),
    (r"답은(?=[^.\n]{0,40}?아[니닙])", "the answer is not "),
    (r"(?:[이가]|은|는)?\s*아니라", ", but "),
    (r"또는|아니면", " or "),
    (r"(?:ではなく|而是|,\s*(?:应该|应)?是(?=\s*[-0-9$\\A-J]))、?", ", but "),
    (r"(?<=[0-9$}A-J)])\s*(?:或者?|还是|か(?:または)?)\s*(?=[-0-9$\\A-J(]|$)", " or "),
    (r"(?:^|(?<=[\s.,!?]))(?:不对|错了|等等|いいえ|いや|待って)", "wait, "),
    (r"也许|可能|大概|かもしれ|たぶん", " maybe "),
]
_COMPILED = [(re.compile(pattern, re.IGNORECASE), replacement) for pattern, replacement in _TRANSLATIONS]


def translate(text: str) -> str:
    """Return `text` with the words of some languages that state, deny, or correct an answer in English, if it has a word for "answer"."""
    if _FOREIGN.search(text.casefold()):
        for pattern, replacement in _COMPILED:
            text = pattern.sub(replacement, text)
    return text
