"""The `[environment]` section. See docs/guides/environments.md."""

from typing import Annotated

from pydantic import AfterValidator, Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.plugs import ENVIRONMENTS


class EnvironmentConfig(ConfigSection):
    """The environment that replies to the policy between its turns. Without this section, a response is a single turn."""

    name: Annotated[str, AfterValidator(ENVIRONMENTS.check_name)]
    """Environment class as `module:attribute`. Example: `examples.arithmetic.calculator:Calculator`."""
    max_turns: int = Field(4, ge=2)
    """Maximum number of policy turns in one response. All turns together have at most `rollout.max_new_tokens` tokens."""
    max_tokens: int = Field(512, ge=1)
    """Maximum number of tokens that the environment adds to one response. These tokens are never trained on."""
    workers: int = Field(2, ge=1)
    """Number of worker processes."""
    timeout: float = Field(5.0, gt=0)
    """Time limit for one message in seconds. After that the worker is replaced, the response ends, and `reward.on_error` applies."""
    memory_mb: int = Field(4096, ge=256)
    """Address-space limit of one worker in MiB."""
