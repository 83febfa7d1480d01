"""Base class of all configuration sections."""

from pydantic import BaseModel, ConfigDict


class ConfigSection(BaseModel):
    """A frozen, strictly typed section. Unknown keys are errors, and the string below each field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False)
