"""Base class of all configuration sections, and their flat form."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """A frozen, strictly typed section. Unknown keys are errors, and the string below each field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False)


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one dictionary with keys such as "section.key"."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
