"""The section `[reward]`: how completions are scored (docs/guides/rewards.md). Imports without torch."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.plugs import REWARDS

_SETTINGS: dict[str, tuple[str, ...]] = {
    "exact": ("pattern",),
    "format": ("pattern",),
    "length": ("full_tokens", "zero_tokens"),
    "http": ("url", "token_env", "batch_size", "timeout", "retries"),
}
"""Which settings a function takes; none where it is not here."""
_REQUIRED = {"format": ("pattern",), "length": ("full_tokens", "zero_tokens"), "http": ("url",)}


class RewardFunctionConfig(ConfigSection):
    """One of several reward functions whose weighted sum is the reward."""

    name: Annotated[str, AfterValidator(REWARDS.check_name)]
    """`math`, `exact`, `format`, `length`, `http`, or your own Python function as `module:attribute`."""
    weight: float = 1.0
    """Factor of this function's value in the sum; 0 only measures."""
    pattern: str = Field("", min_length=1)
    """`format`: regular expression that the whole completion must match. `exact`: one whose last match holds the answer, in its
    first group where it has one. A dot matches line ends too."""
    full_tokens: int = Field(0, ge=0)
    """`length`: completion tokens at which a correct completion is worth 1."""
    zero_tokens: int = Field(0, ge=0)
    """`length`: completion tokens at which it is worth 0; in between the value is linear, beyond both ends constant."""
    url: str = Field("", min_length=1)
    """`http`: address that completions are posted to."""
    token_env: str = Field("", min_length=1)
    """`http`: environment variable that holds a bearer token; none is sent where this is empty."""
    batch_size: int = Field(64, ge=1)
    """`http`: completions per request."""
    timeout: float = Field(60.0, gt=0)
    """`http`: seconds for one request."""
    retries: int = Field(2, ge=0)
    """`http`: further attempts after no connection, a timeout or status 429, 502, 503 or 504."""

    @model_validator(mode="after")
    def _settings(self) -> RewardFunctionConfig:
        _check_settings(self.name, self.model_fields_set)
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression ({error})") from None
        if self.name == "length" and self.full_tokens == self.zero_tokens:
            raise ValueError(f"full_tokens and zero_tokens are both {self.full_tokens}; they must differ")
        if self.name == "http" and not _is_http(self.url):
            raise ValueError(f"url {self.url!r} must be an address such as http://host:8000/score")
        return self

    @model_serializer(mode="wrap")
    def _as_given(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was not given: a function takes none of the others' settings, not even their defaults."""
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class RewardConfig(ConfigSection):
    """How a completion is scored."""

    function: str | None = None
    """The only reward function: `math` (exact integer match first, then math-verify; where nothing is named), `exact` (the completion is
    the answer), or your own as `module:attribute`."""
    functions: tuple[RewardFunctionConfig, ...] | None = Field(None, min_length=1)
    """Instead of `function`: several, or one with settings. The first that judges the answer (neither `format` nor `length`) decides
    what counts as correct."""
    on_error: Literal["zero", "exclude", "stop"] = "zero"
    """What a completion without a verdict gets: reward 0 (`zero`); no part in the training and in its group's mean (`exclude`); or the
    run ends (`stop`)."""
    workers: int = Field(2, ge=1)
    """Worker processes."""
    timeout: float = Field(5.0, gt=0)
    """Seconds that a worker may take for one completion, all functions together; then it is replaced and the sample has no verdict."""
    memory_mb: int = Field(4096, ge=256)
    """Address-space limit of one worker in MiB."""

    @field_validator("function")
    @classmethod
    def _known(cls, function: str | None) -> str | None:
        if function is not None:
            _check_settings(REWARDS.check_name(function), set())
        return function

    @model_validator(mode="after")
    def _functions(self) -> RewardConfig:
        if self.functions and self.function:
            raise ValueError("function and functions cannot both be given; keep one of them")
        if self.functions and all(part.name == "length" for part in self.functions):
            raise ValueError("length judges no answer: add a function that does")
        return self

    @property
    def parts(self) -> dict[str, RewardFunctionConfig]:
        """The functions by label: the name, with a number where it occurs again."""
        counts: Counter[str] = Counter()
        parts = {}
        for part in self.functions or (RewardFunctionConfig(name=self.function or "math"),):
            counts[part.name] += 1
            parts[part.name if counts[part.name] == 1 else f"{part.name}_{counts[part.name]}"] = part
        return parts

    @property
    def correctness_label(self) -> str:
        """The label of the function that decides what is correct; `format` only where nothing else does."""
        labels = sorted(self.parts, key=lambda label: {"format": 1, "length": 2}.get(self.parts[label].name, 0))  # stable
        return labels[0]


def _check_settings(name: str, given: set[str]) -> None:
    if missing := [setting for setting in _REQUIRED.get(name, ()) if setting not in given]:
        raise ValueError(f"{name} needs {' and '.join(missing)}, in a table [[reward.functions]]")
    if foreign := sorted(given - {"name", "weight", *_SETTINGS.get(name, ())}):
        raise ValueError(f"{name} takes no {', '.join(foreign)}")


def _is_http(url: str) -> bool:
    try:
        address: Any = urlsplit(url)
        return address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # a port that is no number
        return False
