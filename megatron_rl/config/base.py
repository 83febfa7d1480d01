"""Base class of all configuration sections, and their flat form."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator

from megatron_rl.config.change import Change
from megatron_rl.config.reading import check_path

MAX_RANKS = 1 << 16
"""Largest number of ranks, engines, or stages. Checks and estimates loop over them before anything starts."""
MAX_TOKENS = 1 << 24
"""Largest number of tokens of a sequence or of a micro-batch."""
MAX_COUNT = 1 << 20
"""Largest number of anything that a step holds in memory or repeats, such as prompts, samples, or retries."""
MAX_STEPS = 1 << 31
"""Largest number of steps or epochs."""
MAX_WORKERS = 1 << 12
"""Largest number of worker processes of one kind."""
MAX_SECONDS = 1e6
"""Longest time limit in seconds. The system's calls take milliseconds as 32-bit integers."""
MAX_MB = 1 << 24
"""Largest amount of memory in MiB."""


class ConfigSection(BaseModel):
    """A frozen, strictly typed section. Unknown keys are errors, and the string below each field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False)
    on_resume: ClassVar[Change | None] = None
    """What a change in a resumed run moves, for fields without a `Change` of their own."""

    @field_validator("*")
    @classmethod
    def _can_be_used(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= 1 << 63:
            raise ValueError("must be an integer of 64 bits")
        if isinstance(value, Path):
            check_path(value)
        return value


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one dictionary with keys such as "section.key", and "section.key.0.name" for a list of tables."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
