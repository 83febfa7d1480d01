"""An environment of OpenEnv (openenv-core 0.3.0) as an agent. The environment is served elsewhere, by `openenv serve` or in a container.

    python -m venv openenv && openenv/bin/pip install openenv-core==0.3.0

    [agent]
    command = ["openenv/bin/python", "examples/plugs/openenv_agent.py", "http://127.0.0.1:8000", "message"]
    own_reward = true

The last word names the field of an action that takes the policy's text. Without it, the policy calls the environment's MCP tools, for which
`agent.tool_parser` must be set. The row's columns, such as `seed`, are the arguments of the environment's `reset`. An episode ends with the
environment, with a response that calls no tool, or at the run's limits. Its reward is the sum of the environment's rewards.
"""

import json
import os
import sys
from typing import Any

import openai
from openenv.core import GenericEnvClient

LIMITS = ("max_calls_reached", "context_length_exceeded")  # codes of the endpoint; the reward is then that of the steps so far


def solve(problem: dict[str, Any], url: str, field: str = "") -> float:
    """Let the policy act until the episode ends, and return the sum of the rewards."""
    policy, reward = openai.OpenAI(), 0.0
    with GenericEnvClient(base_url=url, message_timeout_s=3600).sync() as environment:  # agent.timeout is the limit
        result = environment.reset(**problem["columns"])
        tools = [] if field else environment.step({"type": "list_tools"}).observation["tools"]
        offered: dict[str, Any] = {"tools": [describe(tool) for tool in tools]} if tools else {}
        begin = [problem["prompt"], json.dumps(result.observation)] if result.observation else [problem["prompt"]]
        messages: list[Any] = [{"role": "user", "content": "\n\n".join(begin)}]
        while not result.done:
            try:
                said = policy.chat.completions.create(model="policy", messages=messages, **offered).choices[0].message
            except openai.BadRequestError as error:
                if len(messages) == 1 or error.code not in LIMITS:
                    raise
                break
            messages.append(said)
            actions = [({"role": "user"}, {field: said.content or ""})] if field else [read_call(call) for call in said.tool_calls or ()]
            if not actions:
                break
            for place, action in actions:
                try:
                    result = environment.step(action)
                except RuntimeError as error:
                    if "VALIDATION_ERROR" not in str(error):
                        raise
                    messages.append({**place, "content": str(error)})  # the policy's mistake
                    continue
                reward += result.reward or 0.0
                messages.append({**place, "content": json.dumps(result.observation)})
    return reward


def describe(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def read_call(call: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the beginning of the message that answers a call, and the call as an action. Only the environment judges the arguments."""
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        arguments = call.function.arguments
    action = {"type": "call_tool", "tool_name": call.function.name, "arguments": arguments}
    return {"role": "tool", "tool_call_id": call.id}, action


def main() -> None:
    reward = solve(json.loads(sys.stdin.readline()), *sys.argv[1:])
    with open(os.environ["MEGATRON_RL_REWARD"], "w", encoding="ascii") as file:
        file.write(repr(reward))


if __name__ == "__main__":
    main()
