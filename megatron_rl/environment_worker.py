"""What a worker process runs of an environment: one turn, on an object that comes and goes pickled.

The pool of workers loads a function by its name, `megatron_rl.environment_worker:NAME`; NAME is the environment's, so that a worker
imports it before the time of any answer runs. Nothing else imports this module.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

from megatron_rl.environment import Episode, Message, Reply, load_environment
from megatron_rl.errors import UserError


def __getattr__(name: str) -> Callable[[str, Episode], Reply]:
    try:
        environment = load_environment(name)
    except UserError as error:
        raise AttributeError(str(error)) from None

    def step(text: str, episode: Episode) -> Reply:
        current = pickle.loads(episode.state) if episode.state else environment(episode)
        message = current.step(text)
        if message is None:
            return Reply(0.0, False)
        if not isinstance(message, Message):
            raise TypeError(f"step must return a Message or None, not {type(message).__name__}")
        return Reply(0.0, False, message=Message(message.text, message.error), state=pickle.dumps(current))

    return step
