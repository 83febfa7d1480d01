"""A trial episode of the agent before a run, with an engine that always gives the same response."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.config import Config
from megatron_rl.config.agent import AgentConfig
from megatron_rl.errors import RunError, UserError
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.rollout.engine import Abort, ParsedToolCalls
from megatron_rl.types import Generation, Problem, SamplingParams
from megatron_rl.workers.trial import find_failure


class _TrialEngine:
    """The part of an engine that agents use. `reply` is the text of all responses."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.reply = tokenizer, ""

    def generate(
        self, prompts_B: Sequence[np.ndarray], samplings: Sequence[SamplingParams], abort: Abort | None = None
    ) -> list[Generation]:
        ids_T = np.array(self._tokenizer.encode(self.reply, add_special_tokens=False), np.int32)
        cut = [ids_T[: sampling.max_new_tokens] for sampling in samplings]
        return [Generation(ids, np.zeros(len(ids), np.float32), "stop", 0) for ids in cut]

    def parse_tool_calls(self, text: str, tools: str, parser: str) -> ParsedToolCalls:
        return ParsedToolCalls(text, [])

    def separate_thought(self, text: str, parser: str) -> tuple[str, str]:
        return "", text


def check_agent(agent: AgentConfig, config: Config, tokenizer: Any, problems: Sequence[Problem]) -> None:
    """Run the agent on the first problem of each set. Raise UserError if it fails or sends no request, whatever the policy responds."""
    engine = _TrialEngine(tokenizer)
    sampling = SamplingParams(config.rollout.temperature, config.rollout.max_new_tokens)
    field, value = ("agent.name", agent.name) if agent.name else ("agent.command", " ".join(agent.command or ()))
    with AgentSampler(agent, engine, tokenizer, config.data) as sampler:  # type: ignore[arg-type]

        def call(text: str, problem: Problem) -> str:
            engine.reply = text
            (completion,) = sampler.sample([problem], [sampling], 0)
            return completion.environment_error or ("" if completion.calls else "it ended without a request to the policy")

        try:
            failure = find_failure(call, problems)
        except RunError as error:
            failure = str(error)
    if failure:
        raise UserError(field, value, failure, "correct it; see docs/guides/agents.md")
