"""The `[reward]` section. See docs/guides/rewards.md."""

import re
from collections import Counter
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from megatron_rl.config.base import MAX_COUNT, MAX_MB, MAX_SECONDS, MAX_TOKENS, MAX_WORKERS, ConfigSection
from megatron_rl.config.change import FREELY, LIMITS, NAMED, Change
from megatron_rl.config.reading import as_value_error
from megatron_rl.plugs import REWARDS

_SETTINGS: dict[str, tuple[str, ...]] = {
    "exact": ("pattern",),
    "format": ("pattern",),
    "length": ("full_tokens", "zero_tokens"),
    "http": ("url", "token_env", "batch_size", "timeout", "retries"),
}
"""Settings of each function. Functions that are not listed have no settings."""
_LONGEST_URL = 2048
_REQUIRED = {"format": ("pattern",), "length": ("full_tokens", "zero_tokens"), "http": ("url",)}


_REWARDS = Change(NAMED, "Changes rewards.")
_SERVER = Change(FREELY, "Says where a reward server is and how it is asked.")


class RewardFunctionConfig(ConfigSection):
    """One of several reward functions. The reward is their weighted sum."""

    on_resume = Change(NAMED, "Changes rewards.")

    name: Annotated[str, AfterValidator(REWARDS.check_name)]
    """`math`, `exact`, `format`, `length`, `http`, or your own Python function as `module:attribute`."""
    weight: float = 1.0
    """Weight of this function in the sum. 0 only records its value."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Your own function: keyword arguments for every call, as verl's `reward_kwargs`."""
    pattern: str = Field("", min_length=1)
    """`format`: regular expression that must match the whole completion. `exact`: regular expression whose last match contains the answer,
    in its first group if it has one. A dot also matches line breaks."""
    full_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    """`length`: number of completion tokens at which a correct completion has the value 1."""
    zero_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    """`length`: number of completion tokens at which the value is 0. It is interpolated linearly in between and constant beyond."""
    url: Annotated[str, _SERVER] = Field("", min_length=1)
    """`http`: URL that completions are posted to."""
    token_env: Annotated[str, _SERVER] = Field("", min_length=1)
    """`http`: environment variable with a bearer token. If empty, no token is sent."""
    batch_size: Annotated[int, _SERVER] = Field(64, ge=1, le=MAX_COUNT)
    """`http`: completions per request."""
    timeout: Annotated[float, _SERVER] = Field(60.0, gt=0, le=MAX_SECONDS)
    """`http`: time limit for one request in seconds."""
    retries: Annotated[int, _SERVER] = Field(2, ge=0, le=MAX_COUNT)
    """`http`: number of retries after a connection error, a timeout, or status 429, 502, 503 or 504."""

    @model_validator(mode="after")
    def _settings(self) -> Self:
        _check_settings(self.name, self.model_fields_set)
        if self.name == "length" and self.full_tokens == self.zero_tokens:
            raise ValueError(f"full_tokens and zero_tokens are both {self.full_tokens}; they must differ")
        return self

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        with as_value_error():
            re.compile(pattern)
        return pattern

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if not _is_http(url):
            raise ValueError("must be a URL such as http://host:8000/score")
        return url

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize only the fields that were set, because a function rejects settings of other functions, even their defaults."""
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class RewardConfig(ConfigSection):
    """How a completion is scored."""

    on_resume = LIMITS

    function: Annotated[str | None, _REWARDS] = None
    """The only reward function: `math` (exact integer match, then math-verify; the default), `exact` (the whole completion is the answer),
    or your own as `module:attribute`."""
    functions: tuple[RewardFunctionConfig, ...] | None = Field(None, min_length=1)
    """Reward functions, used instead of `function`: several, or one with settings. The first that judges the answer (not `format` or
    `length`) decides which completions are correct."""
    thinking: Annotated[Literal["auto", "none"] | tuple[str, str], _REWARDS] = "auto"
    """Texts that begin and end a thought, such as `["<think>", "</think>"]`. Built-in functions and votes judge what follows the thought; a
    completion that ends inside its thought earns nothing. `auto`: the markers of the chat template, or `<think>` and `</think>`.
    `none`: the whole completion is the answer."""
    on_error: Annotated[Literal["zero", "exclude", "stop"], _REWARDS] = "zero"
    """What happens to a completion that cannot be scored. `zero`: its reward is 0. `exclude`: it is excluded from training and from its
    group's mean. `stop`: the run ends."""
    max_error_share: float = Field(0.5, ge=0, le=1)
    """Maximum share of a step's or an evaluation's completions without a verdict, because a function, server, environment or agent failed.
    Above it, or if no completion has a verdict, the run ends."""
    workers: int = Field(2, ge=1, le=MAX_WORKERS)
    """Number of worker processes. If engines score the completions (`train.layout.dp` above 1), they share them, each with at least one."""
    timeout: float = Field(5.0, gt=0, le=MAX_SECONDS)
    """Time limit in seconds for one completion, all functions together. After that the worker is replaced and `on_error` applies. The
    first completion of each data set in a worker may take 120 s, because many functions load something then."""
    memory_mb: int = Field(4096, ge=256, le=MAX_MB)
    """Address-space limit of one worker in MiB."""

    @field_validator("function")
    @classmethod
    def _known(cls, function: str | None) -> str | None:
        if function:
            _check_settings(REWARDS.check_name(function), set())
        return function or None  # "" on the command line replaces the file's function, so that `functions` can be given

    @model_validator(mode="after")
    def _functions(self) -> Self:
        if self.functions and self.function:
            raise ValueError("function and functions exclude each other; leave one of them out")
        if self.functions and all(part.name == "length" for part in self.functions):
            raise ValueError("length does not judge the answer; add a function that does")
        return self

    @property
    def parts(self) -> dict[str, RewardFunctionConfig]:
        """The functions by label. The label is the name, with a number if the name repeats."""
        counts: Counter[str] = Counter()
        parts = {}
        for part in self.functions or (RewardFunctionConfig(name=self.function or "math"),):
            counts[part.name] += 1
            parts[part.name if counts[part.name] == 1 else f"{part.name}_{counts[part.name]}"] = part
        return parts

    @property
    def judges(self) -> list[str]:
        """Labels of the functions, of which the first that applies to a problem decides what is correct: `format` after those that judge
        the answer."""
        labels = [label for label, part in self.parts.items() if part.name != "length"]
        return sorted(labels, key=lambda label: self.parts[label].name == "format")  # stable


def _check_settings(name: str, given: set[str]) -> None:
    if missing := [setting for setting in _REQUIRED.get(name, ()) if setting not in given]:
        raise ValueError(f"{name} needs {' and '.join(missing)}, in a table [[reward.functions]]")
    if foreign := sorted(given - {"name", "weight", *(("settings",) if REWARDS.is_own(name) else _SETTINGS.get(name, ()))}):
        raise ValueError(f"{name} has no setting {', '.join(foreign)}")


def _is_http(url: str) -> bool:
    if not url.isprintable() or " " in url or len(url) > _LONGEST_URL:  # urlsplit drops line breaks, and the client raises for them
        return False
    try:
        address: Any = urlsplit(url)
        address.hostname.encode("idna")  # as the client does
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except (ValueError, AttributeError):  # the port is not a number, or there is no host, or none of this name
        return False
