"""The section `[environment]`: who answers the policy between its turns; see docs/guides/environments.md. Imports without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.plugs import ENVIRONMENTS


class EnvironmentConfig(ConfigSection):
    """What the policy talks to while it answers. Without this section an answer is one turn."""

    name: Annotated[str, AfterValidator(ENVIRONMENTS.check_name)]
    """A class of your own as `module:attribute`; `examples.arithmetic.calculator:Calculator` is one."""
    max_turns: int = Field(4, ge=2)
    """Turns of the policy in one answer; together they sample at most rollout.max_new_tokens."""
    max_tokens: int = Field(512, ge=1)
    """Tokens that the environment may add to one answer; they are never trained on."""
    workers: int = Field(2, ge=1)
    """Worker processes."""
    timeout: float = Field(5.0, gt=0)
    """Seconds for one message; then the worker is replaced, and the answer ends and gets what `reward.on_error` says."""
    memory_mb: int = Field(4096, ge=256)
    """Address-space limit of one worker in MiB."""
