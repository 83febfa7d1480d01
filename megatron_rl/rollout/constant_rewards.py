"""Warnings about reward functions that have the same value for all completions of the first steps of a run, so they teach nothing."""

from collections.abc import Callable, Iterable

from megatron_rl.config import Config
from megatron_rl.types import Completion, are_equal

_FIRST_STEPS = 3


class ConstantRewards:
    """Collects the values of the first steps of a run. A resumed run that does not begin with the first step gives no warning."""

    def __init__(self, config: Config, notify: Callable[[str], None]) -> None:
        own = config.agent is not None and config.agent.own_reward
        self._label = "agent.own_reward" if own else next(iter(config.reward.parts))  # of a reward without parts
        self._steps, self._notify = min(_FIRST_STEPS, config.train.steps), notify
        self._values: dict[str, set[float]] = {}
        self._count, self._next = 0, 0

    def observe(self, version: int, completions: Iterable[Completion]) -> None:
        """Record the completions of a step. After the last of the first steps, warn once for each function with a single value."""
        if version != self._next or version >= self._steps:
            return
        self._next += 1
        for reward in (completion.reward for completion in completions if not completion.reward.error):
            self._count += 1
            for label, value in (reward.parts or {self._label: reward.value}).items():
                self._values.setdefault(label, set()).add(value)
        for label, values in self._values.items() if self._next == self._steps and self._count > 1 else ():
            if are_equal(values):
                what = f"the reward {label} was {min(values):g} for all {self._count} completions of the first {self._steps} steps"
                self._notify(f"warning: {what}, so nothing was learned from it; compare samples.jsonl with what the function expects")
