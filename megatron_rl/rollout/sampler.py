"""What makes a run's completions: engine alone, environments or agents. Each is imported where it is used."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from megatron_rl.config import Config
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.environment_pool import EnvironmentPool
from megatron_rl.rollout.generation import MultiTurnSampler, Sampler


def start_environments(config: Config, resources: ExitStack) -> EnvironmentPool | None:
    """Start the environments' workers, without waiting for them, if the run has some; `resources` own them."""
    return None if config.environment is None else resources.enter_context(EnvironmentPool(config.environment))


def check_chat_template(config: Config, tokenizer: Any) -> None:
    """Raise UserError for a chat template that the run's agents cannot use."""
    if config.agent is not None:
        from megatron_rl.rollout.agents.chat_format import ChatFormat

        ChatFormat(tokenizer).check()


def make_sampler(config: Config, engine: Engine, tokenizer: Any, environments: EnvironmentPool | None, resources: ExitStack) -> Sampler:
    """Return the sampler of a configuration; `resources` own what it starts."""
    if config.agent is None:
        return MultiTurnSampler(engine, tokenizer, environments)
    from megatron_rl.rollout.agents.sampler import AgentSampler  # a web server

    return resources.enter_context(AgentSampler(config.agent, engine, tokenizer))
