"""Worker process of environments: `python -m megatron_rl.rollout.environments.worker FD NAME MEMORY_MB PARENT_PID`, see `rewards.worker`.

Environments travel pickled, so any worker can run any turn.
"""

from __future__ import annotations

import functools
import pickle

from megatron_rl.rewards.worker import describe_error, serve
from megatron_rl.rollout.environments.base import EnvironmentClass, Episode, Message, StepResult, load_environment


def run_step(environment: EnvironmentClass, text: str, episode: Episode) -> StepResult:
    """Return the environment's reply to one turn. Whatever it raises, or returns of a wrong type, becomes a StepResult with an error."""
    try:
        current = pickle.loads(episode.state) if episode.state else environment(episode)
        message = current.step(text)
        if message is None:
            return StepResult()
        if not isinstance(message, Message):
            raise TypeError(f"step must return a Message or None, not {type(message).__name__}")
        return StepResult(Message(message.text, message.error), state=pickle.dumps(current))
    except BaseException as error:  # as for rewards: nothing may end the worker
        return StepResult(error=describe_error(error))


if __name__ == "__main__":
    serve(lambda name: functools.partial(run_step, load_environment(name)))
