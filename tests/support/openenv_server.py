"""Servers of OpenEnv, run as `openenv_server.py KIND PORT`: `guess` takes a text, `adder` has a tool. Both draw a number from the seed."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    message: int


class Hint(Observation):
    hint: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=0):
        self.number = seed
        return Hint(hint="guess")

    def step(self, action, **_):
        if action.message == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="more" if action.message < self.number else "less", reward=-0.25)


class AdderEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        mcp = FastMCP("adder")

        @mcp.tool
        def add(a: int) -> int:
            """Add to the number."""
            self.number += a
            return self.number

        super().__init__(mcp)

    def reset(self, seed=0):
        self.number = seed
        return Observation()

    def _step_impl(self, action, **_):
        raise ValueError("no such action")

    async def step_async(self, action, **_):
        observation = await super().step_async(action)
        if isinstance(action, CallToolAction):
            observation.reward, observation.done = 0.5, self.number == 9
        return observation


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    environment = {"guess": (GuessEnvironment, Guess, Hint), "adder": (AdderEnvironment, CallToolAction, CallToolObservation)}[kind]
    uvicorn.run(create_fastapi_app(*environment, max_concurrent_envs=8), port=int(port), log_level="warning")
