"""A resources server of NeMo Gym (nemo-gym 0.4.0) as an agent. The server runs where NeMo Gym is installed, with its tools and rewards:

    gym env start --resources-server example_session_state_mgmt ...      # shows the server's address

    [agent]
    command = ["python", "examples/plugs/nemo_gym_agent.py", "http://127.0.0.1:PORT"]
    tool_parser = "qwen25"
    own_reward = true

    [data]
    train = "example.jsonl"                                 # rows as NeMo Gym has them, with `responses_create_params`
    format = "examples.plugs.nemo_gym_agent:read_row"

This is the loop of NeMo Gym's `simple_agent`, which itself can only call a model server with one address and key for all episodes.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import httpx
import openai

LIMITS = ("max_calls_reached", "context_length_exceeded")  # codes of the endpoint; the server then judges what there is


def read_row(row: Mapping[str, Any]) -> Any:
    """Return a row as a problem. The server knows the answer; the agent gets the row itself in `columns`."""
    from megatron_rl.data.formats import ProblemRow

    return ProblemRow(json.dumps(row["responses_create_params"]["input"], ensure_ascii=False), "known to the server")


def solve(row: dict[str, Any], url: str) -> float:
    """Let the policy work on a row with the server's tools, and return the server's reward."""
    policy, parameters = openai.OpenAI(), row["responses_create_params"]
    asked = parameters["input"]
    history = [{"role": "user", "content": asked}] if isinstance(asked, str) else [*asked]
    start, response = len(history), None
    with httpx.Client(base_url=url, timeout=None) as server:  # its cookie names the session
        server.post("/seed_session", json=row).raise_for_status()
        while True:
            try:
                response = policy.responses.create(**{**parameters, "input": history, "model": "policy"})
            except openai.BadRequestError as error:
                if response is None or error.code not in LIMITS:
                    raise
                break
            history += [item.model_dump() for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if response.incomplete_details or not calls:
                break
            history += [{"type": "function_call_output", "call_id": call.call_id, "output": use_tool(server, call)} for call in calls]
        judged = server.post("/verify", json={**row, "response": {**response.model_dump(), "output": history[start:]}})
        return float(judged.raise_for_status().json()["reward"])


def use_tool(server: httpx.Client, call: Any) -> str:
    """Return what the server says to a call, which may be an error."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        return json.dumps({"error": f"the arguments are not JSON ({error})"})
    return server.post(f"/{call.name}", json=arguments).text


def main() -> None:
    (url,) = sys.argv[1:]
    reward = solve(json.loads(sys.stdin.readline())["columns"], url)
    with open(os.environ["MEGATRON_RL_REWARD"], "w", encoding="ascii") as file:
        file.write(repr(reward))


if __name__ == "__main__":
    main()
