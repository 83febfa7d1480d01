"""Removal of secrets from what a run shows and writes. `redact` is applied where error lines are made and where the files of a run are
written. It masks the secrets that this process holds, user names and tokens in URLs, and tokens of known forms."""

import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

MASK = "***"
_LEAST_LENGTH = 8
"""Shortest value of a variable that is masked because of the variable's name. A shorter value may be a word of any text."""
_VARIABLE = re.compile(r"(?:TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|(?:^|_)KEY|CREDENTIALS?)$", re.IGNORECASE)
"""Names of environment variables that hold secrets, such as HF_TOKEN or WANDB_API_KEY."""
_KEY = r"(?:[\w.-]*(?:token|secret|passw(?:or)?d|pwd|signature|credentials?|apikey)|(?:[\w.-]*[_.-])?(?:key|sig|auth|authorization))"
_URL = re.compile(r"\b[a-z][a-z0-9+.-]{0,20}://[^\s'\"<>]+", re.IGNORECASE)
_USER_INFO = re.compile(r"(://)(?:[^/?#]*@|[^/?#:]*:(?!\d*(?:[/?#]|$)).*@)")  # the second form: a password that contains /, ? or #
_QUERY = re.compile(rf"([?&;#]{_KEY}=)[^&;#]+", re.IGNORECASE)
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{30,}|sk-[\w-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|mrl-[0-9a-f]{32})")
"""Tokens of the Hugging Face hub, OpenAI and GitHub, and of a run's agents."""
_OPTION = re.compile(rf"--?{_KEY}(?:=.*)?", re.IGNORECASE | re.DOTALL)
_SETTING = re.compile(r"(?:.*_)?(?:api_?key|password|passwd|secret|(?:access|auth|bearer|hf)_token)", re.IGNORECASE)

_ARGUMENT = "contains a secret as an argument"

_secrets = set[str]()
_variables = set[str]()


def hold(secret: str) -> None:
    """Mask a secret from now on."""
    if secret:
        _secrets.add(secret)


def hold_variable(name: str) -> None:
    """Mask the value of an environment variable from now on."""
    _variables.add(name)


def redact(text: str) -> str:
    """Return the text with `MASK` in place of every secret."""
    return _mask(text, _compile(frozenset(_list_secrets())))


def redact_forms(text: str) -> str:
    """Return the text with `MASK` in place of user names and tokens in URLs, and of tokens of known forms."""
    if "://" in text:
        text = _URL.sub(lambda url: _QUERY.sub(rf"\1{MASK}", _USER_INFO.sub(rf"\1{MASK}@", url[0])), text)
    return _TOKEN.sub(MASK, text)


def redact_data(value: Any) -> Any:
    """Return nested dictionaries, lists and tuples with all texts redacted. Tuples become lists."""
    held = _compile(frozenset(_list_secrets()))

    def convert(value: Any) -> Any:
        if isinstance(value, str):
            return _mask(value, held)
        if isinstance(value, Mapping):
            return {convert(key): convert(item) for key, item in value.items()}
        return [convert(item) for item in value] if isinstance(value, list | tuple) else value

    return convert(value)


def _mask(text: str, held: re.Pattern[str] | None) -> str:
    return redact_forms(held.sub(MASK, text) if held else text)


def find_secret(name: str, value: object) -> str:
    """Describe the secret that a setting contains by its form, or return "". `name`: last part of the setting's name."""
    if isinstance(value, Mapping):
        return next(filter(None, (find_secret(str(key), item) for key, item in value.items())), "")
    if isinstance(value, list | tuple):
        pairs = zip(value, [*value[1:], ""], strict=False)  # no pair in an empty list
        follows = any(isinstance(word, str) and "=" not in word and _OPTION.fullmatch(word) and after for word, after in pairs)
        return _ARGUMENT if follows else next(filter(None, (find_secret(name, item) for item in value)), "")
    if not isinstance(value, str) or not value:
        return ""
    if ("://" in value and (redact_forms(value) != value or _has_user(value))) or (name == "url" and "@" in value):
        return "contains a user name or a token in a URL"
    if "=" in value and _OPTION.fullmatch(value):
        return _ARGUMENT
    return "contains a secret" if _TOKEN.search(value) or _SETTING.fullmatch(name) else ""


def _has_user(url: str) -> bool:
    try:
        return urlsplit(url).username is not None
    except ValueError:
        return False


def _list_secrets() -> Iterator[str]:
    yield from _secrets
    for name, value in os.environ.items():
        if value.strip() and (name in _variables or (len(value.strip()) >= _LEAST_LENGTH and _VARIABLE.search(name))):
            yield value.strip()


@lru_cache(maxsize=4)
def _compile(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern of secrets as they are and as JSON, HTML, URLs and Python write them, the longest first, or None without any."""
    forms = set[str]()
    for each in secrets:
        written = (json.dumps(each), json.dumps(each, ensure_ascii=False), repr(each))
        forms |= {each, html.escape(each), quote(each, safe=""), *(text[1:-1] for text in written)}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None
