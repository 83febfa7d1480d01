"""An environment of the `verifiers` package as an agent, in a separate virtual environment because the requirements differ.

    python -m venv verifiers && verifiers/bin/pip install verifiers==0.1.14

    [agent]
    command = ["verifiers/bin/python", "examples/plugs/verifiers_agent.py", "ENVIRONMENT", "{}"]
    tool_parser = "qwen25"
    own_reward = true

ENVIRONMENT is a name that `verifiers.load_environment` knows, followed by its arguments as JSON. Questions and answers come from the run's
data; tools, turns, and reward come from the environment.
"""

import asyncio
import json
import os
import sys

import verifiers
from verifiers.types import ClientConfig

sys.path.append(os.getcwd())


async def solve(problem: dict[str, str], environment: str, arguments: dict[str, object]) -> float:
    """Let the environment query the policy and return the environment's reward."""
    loaded = verifiers.load_environment(environment, **arguments)
    question = [{"role": "user", "content": problem["prompt"]}]
    row = {"prompt": question, "answer": problem["answer"], "example_id": 0, "info": {}}
    client = ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY", max_retries=0)
    episode = await loaded.run_rollout(row, client, "policy", {})
    if episode.get("error"):
        raise RuntimeError(episode["error"])
    return float(episode["reward"])


def main() -> None:
    environment, arguments = sys.argv[1:]
    reward = asyncio.run(solve(json.loads(sys.stdin.readline()), environment, json.loads(arguments)))
    with open(os.environ["MEGATRON_RL_REWARD"], "w", encoding="ascii") as file:
        file.write(repr(reward))


if __name__ == "__main__":
    main()
