"""The `[agent]` section. See docs/guides/agents.md."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from megatron_rl.config.base import MAX_COUNT, MAX_MB, MAX_SECONDS, MAX_TOKENS, MAX_WORKERS, ConfigSection
from megatron_rl.config.change import LIMITS, NAMED, Change
from megatron_rl.plugs import AGENTS

_EPISODES = Change(NAMED, "Changes what the agent does.")


class AgentConfig(ConfigSection):
    """A program that works on each problem and calls the policy through an OpenAI-compatible endpoint as often as it needs."""

    on_resume = LIMITS

    name: Annotated[Annotated[str, AfterValidator(AGENTS.check_name)] | None, _EPISODES] = None
    """Agent function as `module:attribute`, called with the problem. Example: `examples.arithmetic.tool_agent:solve`."""
    command: Annotated[tuple[str, ...] | None, _EPISODES] = Field(None, min_length=1)
    """Agent program with its arguments, used instead of `name`. It reads the problem from standard input as one line of JSON."""
    tool_parser: Annotated[str, _EPISODES] = ""
    """SGLang's name for the format of the policy's tool calls, such as `qwen25`. If empty, tool calls are not parsed."""
    reasoning_parser: Annotated[str, _EPISODES] = ""
    """SGLang's name for the format of the policy's thoughts, such as `qwen3`. If empty, thoughts are part of the text."""
    max_calls: Annotated[int, _EPISODES] = Field(16, ge=1, le=MAX_COUNT)
    """Maximum number of policy responses in one episode, over all its conversations. Each has at most `rollout.max_new_tokens` tokens."""
    max_tokens: Annotated[int, _EPISODES] = Field(4096, ge=2, le=MAX_TOKENS)
    """Maximum number of tokens in one conversation, including tokens that the policy did not write."""
    own_reward: Annotated[bool, _EPISODES] = False
    """Whether the agent returns the reward of its episode. If true, no reward function is called."""
    workers: int = Field(32, ge=1, le=MAX_WORKERS)
    """Number of episodes that run at the same time, each in its own process."""
    timeout: float = Field(300.0, gt=0, le=MAX_SECONDS)
    """Time limit for one episode in seconds. After that its processes are terminated and `reward.on_error` applies."""
    memory_mb: int = Field(4096, ge=256, le=MAX_MB)
    """Maximum resident memory of an agent and all processes that it starts, in MiB. It is measured every second."""

    @model_validator(mode="after")
    def _is_named_once(self) -> Self:
        if (self.name is None) == (self.command is None):
            raise ValueError("must set exactly one of name and command")
        return self
