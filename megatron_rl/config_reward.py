"""The section `[reward]`: how completions are scored. Imports without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_rl.config_section import Section


class RewardConfig(Section):
    """How a completion is scored."""

    function: Literal["arithmetic", "math"] = "arithmetic"
    """`arithmetic`: integer after `#`; `math`: exact integer match first, then math-verify."""
    workers: int = Field(2, ge=1)
    """Worker processes."""
    timeout: float = Field(5.0, gt=0)
    """Seconds for one completion; then the worker is replaced and the sample scores 0."""
    memory_mb: int = Field(4096, ge=256)
    """Address-space limit of one worker in MiB."""
