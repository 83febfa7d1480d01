"""A taskset of the `verifiers` package as an agent, in a separate virtual environment because the requirements differ.

    python -m venv verifiers && verifiers/bin/pip install verifiers==0.4.0 uv

    [agent]
    command = ["verifiers/bin/python", "examples/plugs/verifiers_agent.py", '{"taskset": {"id": "TASKSET"}}']
    tool_parser = "qwen25"
    own_reward = true

The JSON is what `verifiers` calls `[env]`; TASKSET is an installed package or a module of this folder. Prompts come from the run's
data, as do the fields of a task that are named like columns of a row, such as `answer`. Tools, turns, and rewards come from the taskset.
Unless the JSON says otherwise, the program is a chat loop (`null`) in a local process, whose packages uv installs at the first episode.
"""

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf

sys.path.append(os.getcwd())
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # where uv is


async def solve(problem: dict[str, Any], settings: dict[str, Any]) -> float:
    """Let the environment query the policy and return the environment's reward."""
    if "id" not in settings:  # an environment with one agent
        settings["agent"] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **settings.get("agent", {})}
    environment = vf.load_environment(vf.resolve_env_config(settings))
    kind = type(environment.taskset).task_type()
    own = kind.data_type().model_fields.keys() - vf.TaskData.model_fields.keys()
    row = {"answer": problem["answer"], **problem["columns"]}
    data = {"prompt": problem["prompt"], **{name: value for name, value in row.items() if name in own}}
    task = kind(kind.data_type().model_validate(data), environment.taskset.config.task)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext("policy", client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
    return float(sum(trace.reward for trace in episode.traces))


def main() -> None:
    (settings,) = sys.argv[1:]
    reward = asyncio.run(solve(json.loads(sys.stdin.readline()), json.loads(settings)))
    with open(os.environ["MEGATRON_RL_REWARD"], "w", encoding="ascii") as file:
        file.write(repr(reward))


if __name__ == "__main__":
    main()
