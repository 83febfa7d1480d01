"""The section `[agent]`: a program that asks the policy over HTTP; see docs/guides/agents.md. Imports without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from megatron_rl.config.base import ConfigSection
from megatron_rl.plugs import AGENTS


class AgentConfig(ConfigSection):
    """A program that works on each problem and asks the policy through an OpenAI-compatible endpoint, as often as it likes."""

    name: Annotated[str, AfterValidator(AGENTS.check_name)] | None = None
    """A function of your own as `module:attribute`, called with the problem; `examples.arithmetic.python_agent:solve` is one."""
    command: tuple[str, ...] | None = Field(None, min_length=1)
    """Instead of `name`: a program with its arguments, which reads the problem as one line of JSON from its standard input."""
    tool_parser: str = ""
    """How the policy writes its calls of tools, by SGLang's name of the format (`qwen25`); none are read where this is empty."""
    max_calls: int = Field(16, ge=1)
    """Answers of the policy in one episode, all conversations together; one samples at most rollout.max_new_tokens."""
    max_tokens: int = Field(4096, ge=2)
    """Tokens of one conversation, the policy's and all others'."""
    own_reward: bool = False
    """The agent says what its episode earned; no reward function is called."""
    workers: int = Field(32, ge=1)
    """Episodes that run at once, each in a process of its own."""
    timeout: float = Field(300.0, gt=0)
    """Seconds for one episode; then its processes are ended, and it gets what `reward.on_error` says."""
    memory_mb: int = Field(4096, ge=256)
    """Address-space limit of an agent's process in MiB."""

    @model_validator(mode="after")
    def _is_named_once(self) -> AgentConfig:
        if (self.name is None) == (self.command is None):
            raise ValueError("must name one of name and command")
        return self
