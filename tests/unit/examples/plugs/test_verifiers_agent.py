"""The agent of the `verifiers` package, in its own environment, against the agents' endpoint."""

import json
import os

import pytest
from support.agents import ChatTokenizer, Policy, config
from support.processes import ROOT

from megatron_rl.config.data import DataConfig
from megatron_rl.rollout.agents.sampler import AgentSampler
from megatron_rl.types import Problem, SamplingParams

PYTHON = os.environ.get("VERIFIERS_PYTHON", "")


@pytest.mark.long
@pytest.mark.skipif(not PYTHON, reason="VERIFIERS_PYTHON names no interpreter that has verifiers==0.4.0 and uv")
def test_a_taskset_asks_the_policy_and_scores_its_reply(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    command = (PYTHON, str(ROOT / "examples" / "plugs" / "verifiers_agent.py"), json.dumps({"taskset": {"id": "vf_echo"}}))
    agent = config(name=None, command=command, own_reward=True, timeout=1000.0, workers=2)
    policy = Policy(lambda prompt: "yes5" if "q" in prompt else "no")
    problems = [Problem(str(number), prompt, "5", columns=row) for number, (prompt, row) in enumerate(ROWS)]
    with AgentSampler(agent, policy, ChatTokenizer(), DataConfig()) as sampler:
        done = sampler.sample(problems, [SamplingParams(1.0, 99, seed=1)] * len(problems), 5, 0)
    right, wrong, broken = done
    assert [(each.own_reward, each.environment_error, each.dialogue) for each in (right, wrong)] == [
        (0.75, "", ["yes5"]),
        (0.0, "", ["no"]),
    ]
    assert broken.calls == 0 and "float_parsing" in broken.environment_error


ROWS = [("q", {"bonus": 0.25, "id": 3}), ("x", {}), ("q", {"bonus": "much"})]
