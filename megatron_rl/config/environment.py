"""The `[environment]` section. See docs/guides/environments.md."""

from typing import Annotated

from pydantic import AfterValidator, Field

from megatron_rl.config.base import MAX_COUNT, MAX_MB, MAX_SECONDS, MAX_TOKENS, MAX_WORKERS, ConfigSection
from megatron_rl.config.change import LIMITS, NAMED, Change
from megatron_rl.plugs import ENVIRONMENTS

_EPISODES = Change(NAMED, "Changes what the environment does.")


class EnvironmentConfig(ConfigSection):
    """The environment that replies to the policy between its turns. Without this section, a response is a single turn."""

    on_resume = LIMITS

    name: Annotated[str, AfterValidator(ENVIRONMENTS.check_name), _EPISODES]
    """Environment class as `module:attribute`. Example: `examples.arithmetic.calculator:Calculator`."""
    max_turns: Annotated[int, _EPISODES] = Field(4, ge=2, le=MAX_COUNT)
    """Maximum number of policy turns in one response. All turns together have at most `rollout.max_new_tokens` tokens."""
    max_tokens: Annotated[int, _EPISODES] = Field(512, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens that the environment adds to one response. These tokens are never trained on."""
    workers: int = Field(2, ge=1, le=MAX_WORKERS)
    """Number of worker processes."""
    timeout: float = Field(5.0, gt=0, le=MAX_SECONDS)
    """Time limit for one message in seconds. After that the worker is replaced, the response ends, and `reward.on_error` applies. The first
    message of a worker may take 120 s."""
    memory_mb: int = Field(4096, ge=256, le=MAX_MB)
    """Address-space limit of one worker in MiB."""
