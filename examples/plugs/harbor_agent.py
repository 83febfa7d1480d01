"""Tasks of Harbor (harbor 0.26.0), such as those of terminal-bench, as an agent: one trial of Harbor per episode.

    python3.12 -m venv harbor && harbor/bin/pip install harbor==0.26.0

    [agent]
    command = ["harbor/bin/python", "examples/plugs/harbor_agent.py", '{"agent": {"name": "terminus-2"}}']
    own_reward = true

A row's column `task` is the folder of a task, or its name `ORGANIZATION/NAME` in Harbor's registry. The JSON is a `TrialConfig` of Harbor:
agent, environment (Docker by default), time limits. The agent must run on this machine, as `terminus-2` does, because the endpoint cannot
be reached from a container. A further word names the reward, if the tests write several; the default is `reward`.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else each episode asks the internet for prices

from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial


async def solve(task: str, settings: dict[str, Any], name: str = "reward") -> float:
    """Run a trial and return its reward. Raise RuntimeError if the trial has none that Harbor calls valid."""
    agent = {"model_name": "openai/policy", **settings.get("agent", {})}  # finds the endpoint in OPENAI_BASE_URL
    place = {"path": task} if Path(task).is_dir() else {"name": task}
    with tempfile.TemporaryDirectory() as folder:
        config = TrialConfig.model_validate({"trials_dir": folder, **settings, "task": place, "agent": agent})
        result = await (await Trial.create(config)).run()
    errors = [f"{each.exception_type}: {each.exception_message}" for each in result.recorded_exceptions()]
    is_cut = bool(errors) and all("agent.max_calls" in error for error in errors)  # the tests have judged what there is
    rewards = result.verifier_result.rewards if result.verifier_result and (result.reward_valid or is_cut) else None
    if not rewards:
        raise RuntimeError("; ".join(errors) or "the task's tests wrote no reward")
    return float(rewards[name])


def main() -> None:
    settings, *name = sys.argv[1:]
    reward = asyncio.run(solve(json.loads(sys.stdin.readline())["columns"]["task"], json.loads(settings), *name))
    with open(os.environ["MEGATRON_RL_REWARD"], "w", encoding="ascii") as file:
        file.write(repr(reward))


if __name__ == "__main__":
    main()
